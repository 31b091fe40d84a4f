"""`asterism log roc`, `log regrade` and `log fork` recompute a part of a finished run under other conditions.

Each of them is a WhatIf, which also compares the result with the recorded run:

    class OtherFilters(NamedTuple):             # implements WhatIf
        tables = ("roc",)                       # --set may change these tables of the configuration
        def recompute(self, conditions): ...    # a Struct with both sides, which --json writes whole
        def show(self, result, console): ...    # the comparison for the terminal; returns the exit code

    code = answer_what_if(OtherFilters(), folder, ["roc.penalty=release"], json_path, console)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from rich.console import Console

from asterism.actors.cli.console import check_json_path, print_line, write_json
from asterism.configs.load import list_differences, load_run, load_with_overrides
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

Result = TypeVar("Result", bound=msgspec.Struct)


class Conditions(NamedTuple):
    folder: RunFolder
    other: RunConfig  # configuration of the run with the overrides applied

    @property
    def run(self) -> RunConfig:
        return load_run(self.folder.config)

    @property
    def settings(self) -> tuple[str, ...]:
        """Describe each overridden key as `key: value in the run -> other value`."""
        return tuple(list_differences(self.run, self.other))


def print_heading(console: Console, run: str, action: str, settings: Sequence[str]) -> None:
    chosen = "; ".join(settings) or "the run's own settings"
    print_line(console, f"{run}, {action} with {chosen}")


class WhatIf(Protocol[Result]):
    @property
    def tables(self) -> tuple[str, ...]: ...

    def recompute(self, conditions: Conditions) -> Result:
        """Recompute under the conditions. Raises UnusableInput."""
        ...

    def show(self, result: Result, console: Console) -> int: ...


def answer_what_if(
    what_if: WhatIf[Result], folder: RunFolder, overrides: Sequence[str], json_path: Path | None, console: Console
) -> int:
    """Recompute and show. Raises UnusableInput, for a wrong key or an unwritable file before the work starts."""
    check_json_path(json_path)
    result = what_if.recompute(Conditions(folder, load_with_overrides(folder.config, overrides, what_if.tables)))
    exit_code = what_if.show(result, console)
    write_json(json_path, result)
    return exit_code
