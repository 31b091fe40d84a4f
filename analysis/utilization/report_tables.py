"""Print the utilization report in the terminal."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asterism.analysis.utilization.idle import CAUSES
from asterism.analysis.utilization.report import Utilization
from asterism.analysis.utilization.trajectory_time import WAITS, TrajectorySummary

_MAX_ROWS = 12  # shown engines or steps; the JSON has all
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 56  # characters of a curve


def build_tables(use: Utilization) -> Iterator[RenderableType]:
    """Yield all tables; each fits into 80 columns."""
    if use.engines:
        yield _build_engine_table(use)
        yield _build_token_table(use)
        yield _build_idle_table(use)
    yield _build_timeline_table(use)
    if use.executors:
        yield _build_executor_table(use)
        yield _build_call_table(use)
    if use.trajectories.ended:
        yield _format_counts(use)
        yield _build_wait_table(use)
        yield _build_longest_table(use.trajectories.longest)
    if use.steps:
        yield _build_step_table(use)
        yield _build_last_table(use)
    for doubt in use.doubts:
        yield Text.from_markup(f"[yellow]doubt:[/] {escape(doubt)}")


def _new_table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _build_engine_table(use: Utilization) -> Table:
    """Show means over each engine's time with weights, with KV tokens as a share of its capacity."""
    columns = ("busy", "running", "peak", "leased", "used", "cached", "peak")
    table = _new_table("Engines: running sequences; KV tokens as a share of the capacity", "", *columns)
    for engine in use.engines[:_MAX_ROWS]:
        table.add_row(
            engine.engine,
            _format_share(engine.busy_s, engine.active_s),
            f"{engine.running_mean:.1f}",
            f"{engine.running_peak:.0f}",
            _format_share(engine.leased_tokens_mean, engine.kv_tokens),
            _format_share(engine.used_tokens_mean, engine.kv_tokens),
            _format_share(engine.cached_tokens_mean, engine.kv_tokens),
            _format_share(engine.used_tokens_peak, engine.kv_tokens),
        )
    return _add_cut_caption(table, len(use.engines), "engines")


def _build_token_table(use: Utilization) -> Table:
    table = _new_table("Tokens", "", "generated", "prefilled", "recomputed", "evicted", "preempted")
    for engine in use.engines[:_MAX_ROWS]:
        done = (engine.generated_tokens, engine.prefilled_tokens, engine.recomputed_tokens, engine.evicted_tokens)
        table.add_row(engine.engine, *(f"{count:,}" for count in (*done, engine.preempted)))
    return _add_cut_caption(table, len(use.engines), "engines")


def _build_idle_table(use: Utilization) -> Table:
    """Show idle seconds as the mean over all engines."""
    table = _new_table("Idle time, mean over engines", "cause", "s", "of its time")
    active_s = sum(engine.active_s for engine in use.engines) / len(use.engines)
    for cause, meaning in CAUSES.items():
        seconds = sum(engine.idle_by_cause_s.get(cause, 0.0) for engine in use.engines) / len(use.engines)
        if seconds >= 0.005:  # smaller values would be shown as 0.00
            table.add_row(meaning, f"{seconds:.2f}", _format_share(seconds, active_s))
    idle_s = sum(engine.idle_s for engine in use.engines) / len(use.engines)
    table.add_row("[bold]total[/]", f"{idle_s:.2f}", _format_share(idle_s, active_s))
    return table


def _build_timeline_table(use: Utilization) -> Table:
    bins = use.timeline.trajectories["leasing"]
    pauses = f" without pauses of {use.paused_s:,.0f} s" if use.paused_s else ""
    table = _new_table(f"Over {len(bins) * use.timeline.bin_s:.1f} s{pauses}, each row against its own peak", "", "")
    for engine in use.engines[:_MAX_ROWS]:
        bins = use.timeline.engines[engine.engine]
        table.add_row(f"{engine.engine} slots", _format_sparkline(bins["running"]))
        table.add_row(f"{engine.engine} KV", _format_sparkline(bins["used"]))
    for phase, what in (("leasing", "wait for a lease"), ("calling", "wait for tools")):
        table.add_row(what, _format_sparkline(use.timeline.trajectories[phase]))
    return table


def _format_sparkline(values: Sequence[float]) -> str:
    chunk = -(-len(values) // _WIDTH)
    means = [sum(values[at : at + chunk]) / len(values[at : at + chunk]) for at in range(0, len(values), chunk)]
    peak = max(means, default=0.0) or 1.0
    return "".join(_BLOCKS[min(8, -int(-8 * max(0.0, mean) // peak))] for mean in means)


def _build_executor_table(use: Utilization) -> Table:
    """Show means over the engines' time. Calls in a fork server run concurrently and share the CPUs."""
    columns = ("servers", "busy", "in them", "peak", "queued", "peak")
    table = _new_table("Executors: fork servers, and the calls in them and before them", "", *columns)
    for executor in use.executors:
        table.add_row(
            executor.executor,
            str(executor.slots or "-"),
            _format_share(executor.busy_s, executor.span_s),
            f"{executor.running_mean:.1f}",
            f"{executor.running_peak:.0f}",
            f"{executor.queued_mean:.1f}",
            f"{executor.queued_peak:.0f}",
        )
    return table


def _build_call_table(use: Utilization) -> Table:
    table = _new_table("Seconds per call", "", "calls", "queued", "in a server", "code")
    for executor in use.executors:
        seconds = (executor.queued_s_per_call, executor.running_s_per_call, executor.code_s_per_call)
        figures = ("-" if each is None else f"{each:.3f}" for each in seconds)
        table.add_row(executor.executor, f"{executor.calls:,}", *figures)
    return table


def _format_counts(use: Utilization) -> Text:
    totals = use.trajectories
    aborted = f" and {totals.aborted:,} were aborted" if totals.aborted else ""
    num_executed = sum(executor.calls for executor in use.executors)
    not_executed = f" ({totals.calls - num_executed:,} not executed)" if num_executed < totals.calls else ""
    return Text(
        f"{totals.ended:,} trajectories ended, {totals.failed:,} of them failed{aborted}: {totals.turns:,} turns, "
        f"{totals.calls:,} calls{not_executed}, {totals.generated_tokens:,} generated tokens, "
        f"{totals.migrations:,} migrations\n"
    )


def _build_wait_table(use: Utilization) -> Table:
    totals = use.trajectories
    table = _new_table("Time of trajectories", "", "total s", "of it", "mean s", "p50", "p99", "longest")
    whole = sum(wait.total_s for wait in totals.waits.values())
    for name, what in WAITS.items():
        wait = totals.waits[name]
        figures = (wait.mean_s, wait.p50_s, wait.p99_s, wait.max_s)
        table.add_row(
            what, f"{wait.total_s:,.1f}", _format_share(wait.total_s, whole), *(f"{each:.3f}" for each in figures)
        )
    return table


def _build_longest_table(longest: Sequence[TrajectorySummary]) -> Table:
    table = _new_table(
        "The ten longest trajectories", "", "step", "ending", "s", "lease", "gen.", "tools", "grade", "tokens"
    )
    for each in longest:
        seconds = (each.lived_s, each.lease_wait_s, each.generation_s, each.tools_s, each.grading_s)
        figures = (*(f"{s:.1f}" for s in seconds), f"{each.tokens:,}")
        table.add_row(str(each.trajectory_id), _shorten_step(each.step), each.ending, *figures)
    return table


def _build_step_table(use: Utilization) -> Table:
    """Show all steps. `tail`: from the end of nine tenths of a step's trajectories to the end of the last one."""
    table = _new_table("Steps", "", "s", "rollout", "train", "weights", "trajectories", "tail")
    for step in use.steps[-_MAX_ROWS:]:
        parts = ("-" if part is None else f"{part:.2f}" for part in (step.step_s, step.rollout_s, step.train_s))
        weights = "-" if step.weights_s is None else f"{step.weights_s:.2f}"
        ended = f"{step.trajectories} ({step.aborted} aborted)" if step.aborted else str(step.trajectories)
        table.add_row(_shorten_step(step.name), *parts, weights, ended, f"{step.tail_s:.2f}")
    if repeated := [_shorten_step(step.name) for step in use.steps if step.repeats]:
        table.caption = f"repeated after a resume: {', '.join(repeated)}; the last repetition counts"
    return _add_cut_caption(table, len(use.steps), "steps, the last")


def _build_last_table(use: Utilization) -> Table:
    table = _new_table("Last trajectory of each step", "", "trajectory")
    table.add_column("why")
    for step in use.steps[-_MAX_ROWS:]:
        if step.last is not None:
            table.add_row(_shorten_step(step.name), str(step.last.trajectory_id), step.why)
    return table


def _shorten_step(step: str) -> str:
    return step.removeprefix("evaluation ")


def _add_cut_caption(table: Table, count: int, what: str) -> Table:
    if count > _MAX_ROWS:
        cut = f"{_MAX_ROWS} of {count} {what}; the JSON has all"
        table.caption = f"{table.caption}\n{cut}" if table.caption else cut
    return table


def _format_share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else "-"
