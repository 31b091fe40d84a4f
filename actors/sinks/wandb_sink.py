"""This sink sends the records to Weights & Biases, or writes them to RUN/wandb for a later `wandb sync`.

The package writes and uploads in the background and confirms only at the end, so the records count as delivered after
`close`. After a kill all records since the last close are sent again under their numbers, which are W&B's steps; the
server already has those records and skips them.
"""

from collections.abc import Sequence

import wandb

from asterism.actors.sinks.contract import BackendRun
from asterism.actors.sinks.metric_records import MetricRecord

AXES = {"rl": "rl/step", "cold_start": "cold_start/step"}  # names of the steps, which are W&B's x axes
PREFIXES = {"rl": ("rl", "evaluation", "lengths", "health"), "cold_start": ("cold_start",)}


class WandbSink:
    is_durable = False

    def __init__(self, run: wandb.Run) -> None:
        self._run = run
        self._first = run.starting_step  # number of the first record that the server lacks
        for axis, prefixes in PREFIXES.items():
            run.define_metric(AXES[axis], hidden=True)
            for prefix in prefixes:
                run.define_metric(f"{prefix}/*", step_metric=AXES[axis])

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            if record.number >= self._first:
                fields = {AXES[record.axis]: record.step, **record.values, **record.texts}
                self._run.log(fields, step=record.number)

    def replace_from(self, step: int) -> None:
        """Do nothing: W&B cannot remove points. A resumed run adds further points at the same steps."""

    def close(self) -> None:
        """Return when all records are uploaded or, offline, written."""
        self._run.finish()
        wandb.teardown()  # only then the file is complete


def open_run(run: BackendRun) -> WandbSink:
    """Open the run. Online it needs the key of `wandb login` or WANDB_API_KEY."""
    settings = wandb.Settings(
        console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True, quiet=True
    )
    opened = wandb.init(
        project=run.config.metrics.project,
        id=run.id,
        name=run.config.name,
        config=run.settings,
        dir=str(run.folder.path.resolve()),
        mode=run.config.metrics.wandb_mode,
        resume="allow",
        settings=settings,
    )
    return WandbSink(opened)
