"""Print simulation outcomes as a table with a column for each policy."""

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from asterism.analysis.simulation.outcome import SimulationOutcome


def build_outcomes_table(outcomes: Sequence[SimulationOutcome]) -> Table:
    """Build the table. All outcomes are of one workload on one cluster."""
    first = outcomes[0]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"{first.workload} on {first.cluster}", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.policy, justify="right")
    for label, format_value in _ROWS:
        table.add_row(label, *(format_value(outcome) for outcome in outcomes))
    if any(outcome.measured_s is not None for outcome in outcomes):
        table.add_row("measured makespan, s", *(_format_measured(outcome) for outcome in outcomes))
    table.add_section()
    table.add_row("mean time of a trajectory")
    for cause in first.waits_s:
        table.add_row(f"{cause}, s", *(f"{each.waits_s[cause] / each.trajectories:.2f}" for each in outcomes))
    table.caption = (
        f"No schedule ends before {first.bounds.lower_s:.1f} s: all work at full batches takes {first.bounds.work_s:.1f} s, "
        f"the longest chain {first.bounds.chain_s:.1f} s."
    )
    table.caption_justify = "left"
    return table


def _format_measured(outcome: SimulationOutcome) -> str:
    """Format the measured makespan with the relative error of the simulation."""
    if outcome.measured_s is None:
        return ""
    return f"{outcome.measured_s:.2f} ({outcome.makespan_s / outcome.measured_s - 1:+.1%})"


_ROWS: Sequence[tuple[str, Callable[[SimulationOutcome], str]]] = (
    ("makespan, s", lambda each: f"{each.makespan_s:.2f}" if each.makespan_s < 100 else f"{each.makespan_s:.1f}"),
    ("times the lower bound", lambda each: f"{each.makespan_s / each.bounds.lower_s:.2f}"),
    ("tokens/s", lambda each: f"{each.generated_tokens / each.makespan_s:,.0f}"),
    ("KV tokens in use", lambda each: f"{each.kv_utilization:.1%}"),
    ("peak on one engine", lambda each: f"{each.most_kv:.1%}"),
    ("decode slots in use", lambda each: f"{each.slot_utilization:.1%}"),
    ("times out of pages", lambda each: f"{each.overflows:,}"),
    ("caches evicted", lambda each: f"{each.evictions:,}"),
    ("sequences preempted", lambda each: f"{each.preemptions:,}"),
    ("recomputed tokens", lambda each: f"{each.recomputed_tokens:,}"),
    ("migrations", lambda each: f"{each.migrations:,}"),
    ("leases", lambda each: f"{each.leases:,}"),
    ("last 1%: began, s", lambda each: f"{each.tail.began_s:.1f}"),
    ("last 1%: waited, s", lambda each: f"{each.tail.waited_s:.1f}"),
    ("last 1%: first ended, s", lambda each: f"{each.tail.first_end_s:.1f}"),
    ("decisions/s", lambda each: f"{each.decisions_per_s:,.0f}"),
    ("simulated in, s", lambda each: f"{each.simulated_in_s:.1f}"),
)
