"""The metric sinks: one record for each name in metrics.sinks, and the module NAME_sink in asterism.actors.sinks."""

from collections.abc import Sequence
from typing import NamedTuple


class SinkKind(NamedTuple):
    store: str  # its file or folder in the run's folder, if the configuration names no other place
    packages: Sequence[str] = ()  # packages that the sink imports; the extra of its name installs them


SINK_KINDS = {
    "tensorboard": SinkKind("tensorboard", ("tensorboard",)),
    "wandb": SinkKind("wandb", ("wandb",)),
    "mlflow": SinkKind("mlflow.db", ("mlflow", "sqlalchemy", "alembic")),
    "trackio": SinkKind("trackio", ("trackio",)),
}
