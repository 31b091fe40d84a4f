"""The metric sinks: one record for each name in metrics.sinks. A further sink is one record here and a module (docs/metrics.md)."""

from collections.abc import Sequence
from typing import NamedTuple


class SinkKind(NamedTuple):
    code: str  # the function that opens it: asterism.actors.sinks.contract.OpenSink
    store: str  # its file or folder in the run's folder, if the configuration names no other place
    packages: Sequence[str] = ()  # that it imports; the extra of its name in pyproject.toml installs them


SINK_KINDS = {
    "tensorboard": SinkKind(
        "asterism.actors.sinks.tensorboard_sink:open_run", store="tensorboard", packages=("tensorboard",)
    ),
    "wandb": SinkKind("asterism.actors.sinks.wandb_sink:open_run", store="wandb", packages=("wandb",)),
    "mlflow": SinkKind(
        "asterism.actors.sinks.mlflow_sink:open_run", store="mlflow.db", packages=("mlflow", "sqlalchemy", "alembic")
    ),
    "trackio": SinkKind("asterism.actors.sinks.trackio_sink:open_run", store="trackio", packages=("trackio",)),
}
