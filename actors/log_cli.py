"""The command line of event logs: `asterism log replay`, `story`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import UnusableInput
from configs.run_folder import RunFolder

log_app = typer.Typer(help="Read a run's event logs.", no_args_is_help=True)
RunArgument = Annotated[Path, typer.Argument(help="A run's folder, such as runs/demo.", metavar="RUN")]


def run_folder(path: Path) -> RunFolder:
    """Raises UnusableInput if there is no run in `path`."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UnusableInput(f"{path}: this is no run's folder (it has no {folder.config.name})")
    return folder


@log_app.command()
def replay(
    run: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every decision's effects and state.")] = False,
) -> None:
    """Feed every decider its log again. With --verify, exit with 1 at the first difference and show it."""
    from actors.log_commands import replay_log

    raise typer.Exit(replay_log(run_folder(run), verify=verify, console=Console()))


@log_app.command()
def story(run: RunArgument, trajectory: Annotated[int, typer.Argument(help="The trajectory's number.")]) -> None:
    """Tell everything that happened to one trajectory, in order."""
    from actors.log_commands import tell_story

    tell_story(run_folder(run), trajectory, console=Console())
