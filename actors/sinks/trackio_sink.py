"""This sink writes the records to a local Trackio store, by default RUN/trackio, which `trackio show` reads.

`trackio sync` uploads the store. Each record has an id: the store's database ignores a record that it already has.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from asterism.actors.sinks.contract import BackendRun
from asterism.actors.sinks.metric_records import MetricRecord


class TrackioSink:
    is_durable = True

    def __init__(self, run: BackendRun) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        self._run = run
        # Trackio's dashboard expects the fields with an underscore.
        self._config: dict[str, Any] | None = {
            **run.settings,
            **{"_Username": None, "_Group": None, "_Created": datetime.now(UTC).isoformat()},
        }

    def write(self, records: Sequence[MetricRecord]) -> None:
        self._storage.bulk_log(
            project=self._run.config.metrics.project,
            run=f"{self._run.config.name}-{self._run.id}",  # Trackio shows runs of one name as one run
            metrics_list=[{**record.values, **record.texts} for record in records],
            steps=[record.step for record in records],
            config=self._config,
            log_ids=[f"{self._run.id}-{record.number}" for record in records],
            run_id=self._run.id,
        )
        self._config = None

    def replace_from(self, step: int) -> None:
        """Keep the records: the store cannot remove them. A resumed run's points at the same step have a later time."""

    def close(self) -> None:
        pass


def open_run(run: BackendRun) -> TrackioSink:
    """Open the store. Trackio reads the folder from the environment when it is imported."""
    os.environ["TRACKIO_DIR"] = str(run.folder.expand_path(run.config.metrics.trackio_folder).resolve())
    return TrackioSink(run)
