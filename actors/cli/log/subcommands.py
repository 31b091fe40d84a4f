"""This file has the arguments and help texts of the subcommands of `asterism log`."""

from math import inf
from pathlib import Path
from typing import Annotated

import typer

from asterism.actors.cli.console import make_console
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder, StagesFolder

log_app = typer.Typer(help="Inspect, replay, compare, export and fork the event logs of a run.", no_args_is_help=True)
_MAX_ID = 2**63 - 1  # largest integer that an event log can store
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a configuration key; may be repeated.")
]
TrajectoryArgument = Annotated[
    int, typer.Argument(help="The trajectory's number.", metavar="TRAJECTORY", min=0, max=_MAX_ID)
]
RunArgument = Annotated[Path, typer.Argument(help="The run's folder, such as runs/demo.", metavar="RUN")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the complete result to this JSON file.")
]
ActorOption = Annotated[
    str | None,
    typer.Option(
        metavar="ACTOR",
        help="Show only events that this actor received: arbiter, buffer, recipe, recorder or rollout-0.",
    ),
]
KindOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="Show only events of this kind, such as TurnGenerated; may be repeated."),
]
SinceOption = Annotated[
    str,
    typer.Option(metavar="T", help="Show events from this time on: seconds since the run's start, or a date and time."),
]
UntilOption = Annotated[str, typer.Option(metavar="T", help="Show events before this time.")]
TextOption = Annotated[
    str,
    typer.Option(
        metavar="TEXT", help="Show only events that contain this text in code, tool output, causes or generated text."
    ),
]


def open_run_folder(path: Path) -> RunFolder:
    """Return the run's folder. Raises UnusableInput if `path` is no run folder."""
    folder = RunFolder(path)
    if not folder.config.exists():
        StagesFolder(path).refuse()
        raise UnusableInput(f"{path}: not a run folder (it has no {folder.config.name})")
    return folder


@log_app.command(rich_help_panel="Read")
def story(run: RunArgument, trajectory: TrajectoryArgument) -> None:
    """Print every event of one trajectory in the order of time."""
    from asterism.actors.cli.log.show_command import print_story

    print_story(open_run_folder(run), trajectory, console=make_console())


@log_app.command(rich_help_panel="Read")
def show(
    run: RunArgument,
    actor: ActorOption = None,
    kind: KindOption = None,
    since: SinceOption = "",
    until: UntilOption = "",
    trajectory: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=_MAX_ID, help="Show only events of this trajectory.")
    ] = None,
    text: TextOption = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep printing the new events of a live run until Ctrl-C.")
    ] = False,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N lines.")] = None,
) -> None:
    """Show the events of all processes, merged by time, one per line.

    An event is shown if it matches all filters.
    """
    from asterism.actors.cli.log.show_command import check_kind, show_log
    from asterism.analysis.event_logs.merged_events import EventFilter, parse_time, read_start_time

    folder = open_run_folder(run)
    start_time = read_start_time(folder)
    event_filter = EventFilter(
        actor,
        tuple(check_kind(each) for each in kind or ()),
        trajectory,
        since=parse_time(since, start_time, "--since") if since else -inf,
        until=parse_time(until, start_time, "--until") if until else inf,
    )
    if event_filter.since >= event_filter.until:
        raise UnusableInput(f"--since {since}: must be before --until {until}")
    show_log(folder, event_filter, text, limit, follow, make_console())


@log_app.command(rich_help_panel="Compare")
def replay(
    run: RunArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Exit with 1 if an effect or a state differs.")] = False,
    until: Annotated[str, typer.Option(metavar="PROCESS:SEQ", help="Stop after this event and print a state.")] = "",
    state: Annotated[
        str | None, typer.Option(metavar="ACTOR", help="Print this actor's state (default: the event's receiver).")
    ] = None,
    trajectory: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Print only this trajectory of a rollout process.")
    ] = None,
) -> None:
    """Replay the log of every decider and show the first difference side by side.

    With --until, print the state of an actor just after that event instead.
    """
    from asterism.actors.cli.log.replay_command import replay_log, show_state

    if until:
        if verify:
            raise UnusableInput("--verify and --until: --verify needs a complete replay; use only one of the two")
        show_state(open_run_folder(run), until, state, trajectory, make_console())
    elif state is not None or trajectory is not None:
        raise UnusableInput("--state and --trajectory need --until PROCESS:SEQ")
    else:
        raise typer.Exit(replay_log(open_run_folder(run), verify=verify, console=make_console()))


@log_app.command(rich_help_panel="Compare")
def diff(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="The folder of a run.")],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="The folder of another run.")],
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Also compare each process's events in order, byte for byte except for times."),
    ] = False,
) -> None:
    """Show the first divergence of two runs; exit with 1 if there is one.

    Compares the contents of each trajectory, the metrics and weights of each step, in any order,
    and the newest checkpoint.
    """
    from asterism.actors.cli.log.diff_command import compare_runs

    raise typer.Exit(compare_runs(open_run_folder(run_a), open_run_folder(run_b), exact=exact, console=make_console()))


@log_app.command(rich_help_panel="Export")
def export(
    run: RunArgument,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write Parquet tables of events and of trajectories.")
    ] = None,
    chrome: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Export only the time of this step.")] = None,
) -> None:
    """Export a run's event logs to Parquet tables and to a Chrome trace."""
    from asterism.analysis.event_logs.parquet_tables import ALL_TIMES, write_parquet
    from asterism.analysis.event_logs.perfetto import write_chrome_trace
    from asterism.analysis.event_logs.spans import build_spans, find_step, select_step

    folder = open_run_folder(run)
    if parquet is None and chrome is None:
        raise UnusableInput("nothing to export: use --parquet FOLDER, --chrome FILE, or both")
    try:
        spans = build_spans(folder) if chrome is not None or step is not None else []
        span = None if step is None else find_step(spans, step)
        if parquet is not None:
            time_range = ALL_TIMES if span is None else (span.start_s, span.end_s)
            for name, rows in write_parquet(folder, parquet, time_range).items():
                typer.echo(f"{parquet / name}: {rows:,} rows")
        if chrome is not None:
            written = write_chrome_trace(spans if step is None else select_step(spans, step), chrome)
            typer.echo(f"{chrome}: {written:,} spans")
    except OSError as error:
        raise UnusableInput(f"{error.filename}: {error.strerror}") from error


@log_app.command(rich_help_panel="What if")
def fork(
    run: RunArgument,
    trajectory: TrajectoryArgument,
    turn: Annotated[int, typer.Option(metavar="K", help="Continue from the start of this turn, counted from 0.")],
    tool_result: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replace the result of the last call before the turn with this text."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Checkpoint to generate with (default: that of the turn's policy)."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="Sampling seed (default: the original's).")
    ] = None,
    count: Annotated[
        int, typer.Option("-n", min=1, help="Number of branches; each one after the first has a derived seed.")
    ] = 1,
    override: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Continue a logged trajectory from turn K and compare the branches with the original.

    A branch can have another tool result, checkpoint or seed; otherwise it repeats the original.
    """
    from asterism.actors.cli.log.fork_command import ForkOptions, fork_trajectory

    options = ForkOptions(trajectory, turn, tool_result, checkpoint, seed, count, override or [], json_file)
    raise typer.Exit(fork_trajectory(open_run_folder(run), options, make_console()))


@log_app.command(rich_help_panel="What if")
def roc(
    run: RunArgument,
    step: Annotated[str, typer.Option(metavar="N|all", help="Step to judge, or all steps.")] = "all",
    override: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show which trajectories other Resample-on-Correct settings would keep.

    Example: `--set roc.penalty=release`.
    """
    from asterism.actors.cli.log.roc_command import OtherFilters
    from asterism.actors.cli.log.what_if import answer_what_if

    filters = OtherFilters.parse(step)
    raise typer.Exit(answer_what_if(filters, open_run_folder(run), override or [], json_file, make_console()))


@log_app.command("regrade", rich_help_panel="What if")
def regrade_run(
    run: RunArgument,
    task: Annotated[str, typer.Option(help="Name of a task: only its trajectories, and --set reward.KEY is its.")] = "",
    override: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Score the stored trajectories again with other rewards, without an engine.

    The calls of environments and dialogues are repeated in new instances. Example: `--set reward.accept=any`, or
    `--task search --set reward.functions.format=rewards.py:score_format`.
    """
    from asterism.actors.cli.log.regrade_command import OtherRewards
    from asterism.actors.cli.log.what_if import answer_what_if

    rewards = OtherRewards(task)
    overrides = rewards.locate_overrides(override or [])
    raise typer.Exit(answer_what_if(rewards, open_run_folder(run), overrides, json_file, make_console()))


@log_app.command(rich_help_panel="Read")
def waits(run: RunArgument) -> None:
    """Show what each process and trajectory waits for, now or at the end of the run."""
    from asterism.actors.cli.log.waits_command import print_waits

    print_waits(open_run_folder(run))
