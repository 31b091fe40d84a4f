"""The report in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from analysis.utilization.engines import EngineUse
from analysis.utilization.idle import CAUSES
from analysis.utilization.report import Utilization
from analysis.utilization.trajectories import WAITS, Lived

_SHOWN = 12  # engines, and steps; the JSON has all
_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 56  # of a curve, in characters


def tables(use: Utilization) -> Iterator[RenderableType]:
    """Each fits into 80 columns."""
    if use.engines:
        yield _engines(use)
        yield _tokens(use)
        yield _idle(use)
    yield _over_time(use)
    if use.executors:
        yield _executors(use)
    if use.trajectories.ended:
        yield _counts(use)
        yield _waits(use)
        yield _longest(use.trajectories.longest)
    if use.steps:
        yield _steps(use)
        yield _last(use)
    for doubt in use.doubts:
        yield Text.from_markup(f"[yellow]doubt:[/] {escape(doubt)}")


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _engines(use: Utilization) -> Table:
    """Means over each engine's time with weights; KV tokens as a share of its capacity."""
    columns = ("busy", "running", "peak", "leased", "used", "cached", "peak")
    table = _table("Engines: sequences that run; KV tokens, of the capacity", "", *columns)
    for engine in use.engines[:_SHOWN]:
        table.add_row(
            engine.engine,
            _share(engine.busy_s, engine.active_s),
            f"{engine.running_mean:.1f}",
            f"{engine.running_peak:.0f}",
            _share(engine.leased_tokens_mean, engine.kv_tokens),
            _share(engine.used_tokens_mean, engine.kv_tokens),
            _share(engine.cached_tokens_mean, engine.kv_tokens),
            _share(engine.used_tokens_peak, engine.kv_tokens),
        )
    return _cut(table, len(use.engines), "engines")


def _tokens(use: Utilization) -> Table:
    table = _table("Tokens", "", "generated", "prefilled", "recomputed", "evicted", "preempted")
    for engine in use.engines[:_SHOWN]:
        done = (engine.generated_tokens, engine.prefilled_tokens, engine.recomputed_tokens, engine.evicted_tokens)
        table.add_row(engine.engine, *(f"{count:,}" for count in (*done, engine.preempted)))
    return _cut(table, len(use.engines), "engines")


def _idle(use: Utilization) -> Table:
    """Of all engines together: the mean one's seconds."""
    table = _table("Idle time of the mean engine", "cause", "s", "of its time")
    active_s = sum(engine.active_s for engine in use.engines) / len(use.engines)
    for cause, meaning in CAUSES.items():
        seconds = sum(engine.idle_by_cause_s.get(cause, 0.0) for engine in use.engines) / len(use.engines)
        if seconds >= 0.005:  # else it would be shown as none
            table.add_row(meaning, f"{seconds:.2f}", _share(seconds, active_s))
    table.add_row("[bold]in all[/]", f"{_idle_s(use.engines):.2f}", _share(_idle_s(use.engines), active_s))
    return table


def _idle_s(engines: Sequence[EngineUse]) -> float:
    return sum(engine.idle_s for engine in engines) / len(engines)


def _over_time(use: Utilization) -> Table:
    bins = use.timeline.trajectories["leasing"]
    table = _table(f"Over {len(bins) * use.timeline.bin_s:.1f} s, each row against its own peak", "", "")
    for engine in use.engines[:_SHOWN]:
        bins = use.timeline.engines[engine.engine]
        table.add_row(f"{engine.engine} slots", _curve(bins["running"]))
        table.add_row(f"{engine.engine} KV", _curve(bins["used"]))
    for phase, what in (("leasing", "wait for a lease"), ("calling", "wait for tools")):
        table.add_row(what, _curve(use.timeline.trajectories[phase]))
    return table


def _curve(values: Sequence[float]) -> str:
    chunk = -(-len(values) // _WIDTH)
    means = [sum(values[at : at + chunk]) / len(values[at : at + chunk]) for at in range(0, len(values), chunk)]
    peak = max(means, default=0.0) or 1.0
    return "".join(_BLOCKS[min(8, -int(-8 * max(0.0, mean) // peak))] for mean in means)


def _executors(use: Utilization) -> Table:
    columns = ("slots", "busy", "running", "peak", "queued", "peak", "calls", "s queued")
    table = _table("Executors: means over the whole time; seconds in the queue a call", "", *columns)
    for executor in use.executors:
        table.add_row(
            executor.executor,
            str(executor.slots),
            _share(executor.busy_s, executor.span_s),
            f"{executor.running_mean:.1f}",
            f"{executor.running_peak:.0f}",
            f"{executor.queued_mean:.1f}",
            f"{executor.queued_peak:.0f}",
            f"{executor.calls:,}",
            f"{executor.queued_s_per_call:.3f}",
        )
    return table


def _counts(use: Utilization) -> Text:
    told = use.trajectories
    aborted = f" and {told.aborted:,} were aborted" if told.aborted else ""
    return Text(
        f"{told.ended:,} trajectories ended, {told.failed:,} of them failed{aborted}: {told.turns:,} turns, {told.calls:,} calls, "
        f"{told.generated_tokens:,} generated tokens, {told.migrations:,} moves to another engine\n"
    )


def _waits(use: Utilization) -> Table:
    told = use.trajectories
    table = _table("Where trajectories' time went", "", "total s", "of it", "mean s", "p50", "p99", "longest")
    whole = sum(wait.total_s for wait in told.waits.values())
    for name, what in WAITS.items():
        wait = told.waits[name]
        figures = (wait.mean_s, wait.p50_s, wait.p99_s, wait.max_s)
        table.add_row(what, f"{wait.total_s:,.1f}", _share(wait.total_s, whole), *(f"{each:.3f}" for each in figures))
    return table


def _longest(longest: Sequence[Lived]) -> Table:
    table = _table(
        "The ten that took longest", "", "step", "ending", "s", "lease", "gener.", "tools", "grade", "tokens"
    )
    for each in longest:
        seconds = (each.lived_s, each.lease_wait_s, each.generation_s, each.tools_s, each.grading_s)
        figures = (*(f"{s:.2f}" for s in seconds), f"{each.tokens:,}")
        table.add_row(str(each.trajectory_id), _short(each.step), each.ending, *figures)
    return table


def _steps(use: Utilization) -> Table:
    """`tail`: from when nine tenths of its trajectories had ended to when the last one had."""
    table = _table("Steps", "", "s", "rollout", "train", "weights", "trajectories", "tail")
    for step in use.steps[-_SHOWN:]:
        parts = ("-" if part is None else f"{part:.2f}" for part in (step.step_s, step.rollout_s, step.train_s))
        weights = "-" if step.weights_s is None else f"{step.weights_s:.2f}"
        ended = f"{step.trajectories} ({step.aborted} aborted)" if step.aborted else str(step.trajectories)
        table.add_row(_short(step.name), *parts, weights, ended, f"{step.tail_s:.2f}")
    return _cut(table, len(use.steps), "steps, the last")


def _last(use: Utilization) -> Table:
    table = _table("Who finished last", "", "trajectory")
    table.add_column("why")
    for step in use.steps[-_SHOWN:]:
        if step.last is not None:
            table.add_row(_short(step.name), str(step.last.trajectory_id), step.why)
    return table


def _short(step: str) -> str:
    return step.removeprefix("evaluation ")


def _cut(table: Table, count: int, what: str) -> Table:
    if count > _SHOWN:
        table.caption = f"{_SHOWN} of {count} {what}; the JSON has all"
    return table


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else "-"
