"""The command line of event logs: `asterism log show`, `story`, `waits`, `replay`, `diff`, `export`,
`fork`, `roc`."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from configs.errors import UnusableInput
from configs.run_folder import RunFolder

log_app = typer.Typer(help="Read a run's event logs.", no_args_is_help=True)
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
]
_GREATEST = 2**63 - 1  # that an event log can hold
TrajectoryArgument = Annotated[
    int, typer.Argument(help="The trajectory's number.", metavar="TRAJECTORY", min=0, max=_GREATEST)
]
RunArgument = Annotated[Path, typer.Argument(help="A run's folder, such as runs/demo.", metavar="RUN")]


def run_folder(path: Path) -> RunFolder:
    """Raises UnusableInput if there is no run in `path`."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise UnusableInput(f"{path}: this is no run's folder (it has no {folder.config.name})")
    return folder


def _console() -> Console:
    """What was logged is shown as it is: no emoji stands for `:100:` in a model's `x[:100:2]`."""
    return Console(emoji=False)


@log_app.command()
def replay(
    run: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Compare every decision's effects and state.")] = False,
    until: Annotated[str, typer.Option("--until", metavar="PROCESS:SEQ", help="Stop after this event.")] = "",
    state: Annotated[str | None, typer.Option("--state", metavar="ACTOR", help="Print its state then.")] = None,
    trajectory: Annotated[
        int | None, typer.Option("--trajectory", metavar="N", min=0, help="Of a rollout: this one's alone.")
    ] = None,
) -> None:
    """Feed every decider its log again. With --verify, exit with 1 at the first difference and show it side by side.

    With --until, print the state of an actor just after that event.
    """
    from actors.log_replay import replay_log, show_state

    if until:
        if verify:
            raise UnusableInput("--verify and --until: a replay is compared as a whole; give one of the two")
        show_state(run_folder(run), until, state, trajectory, _console())
    elif state is not None or trajectory is not None:
        raise UnusableInput("--state and --trajectory need --until PROCESS:SEQ")
    else:
        raise typer.Exit(replay_log(run_folder(run), verify=verify, console=_console()))


@log_app.command()
def story(run: RunArgument, trajectory: TrajectoryArgument) -> None:
    """Tell everything that happened to one trajectory, in order."""
    from actors.log_commands import tell_story

    tell_story(run_folder(run), trajectory, console=_console())


@log_app.command()
def show(
    run: RunArgument,
    actor: Annotated[
        str | None,
        typer.Option(
            "--actor", metavar="ACTOR", help="Events that it received: arbiter, buffer, recipe, recorder or rollout-0."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Events of this kind, such as TurnGenerated; may be repeated."),
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="T", help="Seconds since the run began, or a date and time.")
    ] = "",
    until: Annotated[str, typer.Option("--until", metavar="T", help="The first moment that is not shown.")] = "",
    trajectory: Annotated[
        int | None, typer.Option("--trajectory", metavar="N", min=0, max=_GREATEST, help="Events about this one.")
    ] = None,
    text: Annotated[
        str,
        typer.Option(
            "--text", metavar="WORDS", help="Events with these: in codes, outputs, causes, and what models wrote."
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what a live run logs, until ^C.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Lines at most.")] = None,
) -> None:
    """Show the events of all processes, merged by time, a line each. Filters combine."""
    from actors.log_show import known_kind, show_log
    from analysis.event_logs.merging import Choice, began_at, moment

    folder = run_folder(run)
    began = began_at(folder)
    choice = Choice(
        actor,
        tuple(known_kind(each) for each in kind or ()),
        trajectory,
        since=moment(since, began, "--since") if since else -inf,
        until=moment(until, began, "--until") if until else inf,
    )
    if choice.since >= choice.until:
        raise UnusableInput(f"--since {since}: this is not before --until {until}")
    show_log(folder, choice, text, limit, follow, _console())


@log_app.command()
def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run's folder.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run's.")],
    exact: Annotated[
        bool, typer.Option("--exact", help="Each process's events in their order, byte for byte, times apart.")
    ] = False,
) -> None:
    """Say where two runs part, and exit with 1; with 0 if they do not.

    Compared are each trajectory's contents and each step's figures, whatever order they arrived in.
    """
    from actors.log_diff import compare_runs

    raise typer.Exit(compare_runs(run_folder(run_a), run_folder(run_b), exact=exact, console=_console()))


@log_app.command()
def export(
    run: RunArgument,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FOLDER", help="Tables of events and of trajectories.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option("--chrome", metavar="FILE", help="A trace for ui.perfetto.dev.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Of the trace: this step's time alone.")] = None,
) -> None:
    """Write a run's event logs for other programs."""
    from analysis.event_logs.chrome import write_chrome
    from analysis.event_logs.slices import of_step, slices_of
    from analysis.event_logs.tables import write_parquet

    folder = run_folder(run)
    if parquet is None and chrome is None:
        raise UnusableInput("give --parquet FOLDER, --chrome FILE, or both")
    if step is not None and chrome is None:
        raise UnusableInput(f"--step {step}: it is of the trace alone; give --chrome FILE")
    try:
        if parquet is not None:
            for name, rows in write_parquet(folder, parquet).items():
                typer.echo(f"{parquet / name}: {rows:,} rows")
        if chrome is not None:
            slices = slices_of(folder)
            written = write_chrome(slices if step is None else of_step(slices, step), chrome)
            typer.echo(f"{chrome}: {written:,} slices")
    except OSError as error:
        raise UnusableInput(f"{error.filename}: {error.strerror}") from error


@log_app.command()
def fork(
    run: RunArgument,
    trajectory: TrajectoryArgument,
    turn: Annotated[int, typer.Option("--turn", metavar="K", help="Go on from the beginning of this turn, from 0.")],
    tool_result: Annotated[
        Path | None,
        typer.Option("--tool-result", metavar="FILE", help="What the last call before the turn printed instead."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="DIR", help="Generate with this one; else the one that generated the turn."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, max=2**64 - 1, help="Draw by this one; else as the original did.")
    ] = None,
    count: Annotated[
        int, typer.Option("-n", min=1, help="So many branches; those after the first draw by seeds of their own.")
    ] = 1,
    override: SetOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it all there.")] = None,
) -> None:
    """Go on from turn K of a logged trajectory: with another tool result, policy or seed, or as it was; and compare."""
    from actors.fork_command import Options, fork_trajectory

    options = Options(trajectory, turn, tool_result, checkpoint, seed, count, override or [], json_file)
    raise typer.Exit(fork_trajectory(run_folder(run), options, _console()))


@log_app.command()
def roc(
    run: RunArgument,
    step: Annotated[str, typer.Option("--step", metavar="N|all", help="One step, or all.")] = "all",
    override: SetOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it all there.")] = None,
) -> None:
    """Filter the logged groups again with other settings, as in `--set roc.penalty=release`: who would have been kept."""
    from actors.roc_command import filter_again

    filter_again(run_folder(run), step, override or [], json_file, _console())


@log_app.command()
def waits(run: RunArgument) -> None:
    """Say who waits for whom, for what and since when: now, or when the run ended."""
    from actors.waits import tell_waits

    tell_waits(run_folder(run))
