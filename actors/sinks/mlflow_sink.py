"""This sink sends the records to an MLflow tracking server or database: by default RUN/mlflow.db.

An MLflow metric has its own step; both axes share it, since their metrics have different names.
"""

import time
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.utils.validation import MAX_METRICS_PER_BATCH, MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

from asterism.actors.sinks.contract import BackendRun
from asterism.actors.sinks.metric_records import MetricRecord

IDENTITY_TAG = "asterism.run_id"


class MlflowSink:
    is_durable = True

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def write(self, records: Sequence[MetricRecord]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now_ms, record.step) for record in records for name, value in record.values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS_PER_BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS_PER_BATCH])
        for record in records:
            for name, text in record.texts.items():  # MLflow has no series of texts
                self._client.set_tag(self._run_id, f"{name}/step_{record.step}", text[:MAX_PARAM_VAL_LENGTH])

    def replace_from(self, step: int) -> None:
        """Keep the records: MLflow cannot remove them. The resumed run's points at the same step have a later time."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED")


def open_run(run: BackendRun) -> MlflowSink:
    """Open the run. A server may need MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN."""
    options = run.config.metrics
    client = MlflowClient(options.mlflow_uri.replace("$RUN", str(run.folder.path.resolve())))
    experiment = client.get_experiment_by_name(options.project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(options.project)
    found = client.search_runs([experiment_id], f"tags.`{IDENTITY_TAG}` = '{run.id}'")
    if found:
        opened = found[0]
        client.update_run(opened.info.run_id, "RUNNING")
    else:
        opened = client.create_run(experiment_id, tags={IDENTITY_TAG: run.id}, run_name=run.config.name)
    # A parameter cannot change: parameters of a resumed run that may differ keep their first value.
    params = [
        Param(key, value[:MAX_PARAM_VAL_LENGTH])
        for key, value in run.flatten_settings().items()
        if key not in opened.data.params
    ]
    for start in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
        client.log_batch(opened.info.run_id, params=params[start : start + MAX_PARAMS_TAGS_PER_BATCH])
    return MlflowSink(client, opened.info.run_id)
