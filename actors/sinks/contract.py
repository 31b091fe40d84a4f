"""The contract of a metric sink, and the sinks by name."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import msgspec
from msgspec import to_builtins

from asterism.actors.sinks.metric_records import MetricRecord
from asterism.configs.choices.sink_kinds import SINK_KINDS
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

# These tables have variables of processes (sglang, tasks), and arguments of the user's code (tasks, engine).
SECRET_TABLES = ("environment", "variables", "parameters", "options")
HIDDEN = "(hidden)"


class BackendRun(msgspec.Struct, frozen=True):
    """The run in the backends: all launches of a run's folder continue the same one."""

    id: str  # random id, kept in the folder
    config: RunConfig
    folder: RunFolder

    @property
    def settings(self) -> dict[str, Any]:
        """Return the configuration for the backend, without the values of tables that may have keys or passwords."""
        return _hide_secrets(to_builtins(self.config))

    def flatten_settings(self) -> dict[str, str]:
        """Return the settings by the key's full path, such as `rl.steps`."""
        return dict(_flatten(self.settings, ""))


class MetricSink(Protocol):
    """A sink of records in its own process, so each call may block. An exception ends the process; the next process
    repeats the undelivered records."""

    is_durable: bool  # whether records are delivered after `write`; otherwise only after `close`

    def write(self, records: Sequence[MetricRecord]) -> None:
        """Write the records. After a kill, a record can come twice."""
        ...

    def replace_from(self, step: int) -> None:
        """Invalidate the RL records from this step on: a resumed run repeats them."""
        ...

    def close(self) -> None: ...


def _hide_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {
            key: dict.fromkeys(inner, HIDDEN) if key in SECRET_TABLES else _hide_secrets(inner)
            for key, inner in table.items()
        }
    return [_hide_secrets(each) for each in value] if isinstance(value, list | tuple) else value


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _flatten(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(each, dict) for each in cast("list[Any]", value)):
        for number, inner in enumerate(cast("list[Any]", value)):
            yield from _flatten(inner, f"{path}.{number}")
    else:
        yield path, str(value)


def open_sink(name: str, run: BackendRun) -> MetricSink:
    """Import the sink's package, which takes up to seconds, and connect to its backend, which may block."""
    return importlib.import_module(f"asterism.actors.sinks.{name}_sink").open_run(run)


def check_sinks(names: Sequence[str]) -> Sequence[str]:
    """Return the names. Raises UnusableInput for an unknown sink, or one without its packages. Imports no package."""
    for name in names:
        if name not in SINK_KINDS:
            raise UnusableInput(f'"{name}" is no sink; known: {", ".join(SINK_KINDS)}')
        missing = [package for package in SINK_KINDS[name].packages if importlib.util.find_spec(package) is None]
        if missing:
            raise UnusableInput(
                f'"{name}" needs the package {missing[0]}, which is not installed: pip install "asterism[{name}]"'
            )
    return names
