"""Outcomes side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from analysis.simulation.outcome import Outcome


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """A column for each policy; all of one workload on one cluster."""
    first = outcomes[0]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{first.workload} on {first.cluster}", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.policy, justify="right")
    for label, told in _ROWS:
        table.add_row(label, *(told(outcome) for outcome in outcomes))
    if any(outcome.measured_s is not None for outcome in outcomes):
        table.add_row("measured makespan, s", *(_measured(outcome) for outcome in outcomes))
    table.add_section()
    table.add_row("a trajectory's time, mean")
    for cause in first.waits_s:
        table.add_row(f"{cause}, s", *(_share(outcome, cause) for outcome in outcomes))
    table.caption = (
        f"No schedule ends before {first.bounds.lower_s:.1f} s: all work at full batches takes {first.bounds.work_s:.1f} s, "
        f"the longest chain {first.bounds.chain_s:.1f} s."
    )
    table.caption_justify = "left"
    return table


def _measured(outcome: Outcome) -> str:
    """With how far the simulated one is from it."""
    if outcome.measured_s is None:
        return ""
    return f"{outcome.measured_s:.2f} ({outcome.makespan_s / outcome.measured_s - 1:+.1%})"


def _share(outcome: Outcome, cause: str) -> str:
    return f"{outcome.waits_s[cause] / outcome.trajectories:.2f}"


_ROWS: Sequence[tuple[str, Callable[[Outcome], str]]] = (
    ("makespan, s", lambda each: f"{each.makespan_s:.2f}" if each.makespan_s < 100 else f"{each.makespan_s:.1f}"),
    ("times the lower bound", lambda each: f"{each.makespan_s / each.bounds.lower_s:.2f}"),
    ("tokens/s", lambda each: f"{each.generated_tokens / each.makespan_s:,.0f}"),
    ("KV tokens in use", lambda each: f"{each.kv_utilization:.1%}"),
    ("at most, on one engine", lambda each: f"{each.most_kv:.1%}"),
    ("decode slots in use", lambda each: f"{each.slot_utilization:.1%}"),
    ("overfull, times", lambda each: f"{each.overflows:,}"),
    ("caches evicted", lambda each: f"{each.evictions:,}"),
    ("sequences preempted", lambda each: f"{each.preemptions:,}"),
    ("tokens computed again", lambda each: f"{each.recomputed_tokens:,}"),
    ("migrations", lambda each: f"{each.migrations:,}"),
    ("leases", lambda each: f"{each.leases:,}"),
    ("last 1%: began, s", lambda each: f"{each.tail.began_s:.1f}"),
    ("last 1%: waited, s", lambda each: f"{each.tail.waited_s:.1f}"),
    ("last 1%: first ended, s", lambda each: f"{each.tail.first_end_s:.1f}"),
    ("decisions/s", lambda each: f"{each.decisions_per_s:,.0f}"),
    ("simulated in, s", lambda each: f"{each.simulated_in_s:.1f}"),
)
