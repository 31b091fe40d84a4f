"""The metric sinks: one record for each name in metrics.sinks, and the module NAME_sink in asterism.actors.sinks."""

from collections.abc import Sequence
from typing import NamedTuple


class SinkKind(NamedTuple):
    store: str  # the sink's file or folder in the run's folder, unless the configuration names one
    packages: Sequence[str] = ()  # packages that the sink imports; the extra of this name installs these


SINK_KINDS = {
    "tensorboard": SinkKind("tensorboard", ("tensorboard",)),
    "wandb": SinkKind("wandb", ("wandb",)),
    "mlflow": SinkKind("mlflow.db", ("mlflow", "sqlalchemy", "alembic")),
    "trackio": SinkKind("trackio", ("trackio",)),
}
