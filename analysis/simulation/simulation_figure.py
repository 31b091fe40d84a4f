"""Draw simulation outcomes: live trajectories, slots, caches and waits over time; time by cause; recomputed tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from asterism.analysis.plotting import Color, Panel, draw_figure
from asterism.analysis.simulation.outcome import SimulationOutcome, TimelineSample

Value = Callable[[SimulationOutcome, TimelineSample], float]
_LIVE = "Live trajectories"
_TIMELINES: Sequence[tuple[str, str, Value, bool]] = (  # title, unit, value, percent
    (_LIVE, "dot: the last hundredth begins to end", lambda _, each: each.live, False),
    ("Decode slots in use", "share of all engines' slots", lambda outcome, each: each.running / outcome.slots, True),
    ("KV tokens in use", "share of all engines' capacity", lambda run, each: each.used_tokens / run.kv_tokens, True),
    (
        "Waiting for room",
        "trajectories without a lease, or queued at an engine",
        lambda _, each: each.leasing + each.waiting,
        False,
    ),
)
_WAIT_BARS: Sequence[tuple[str, Color, tuple[str, ...]]] = (  # label, color, keys of waits_s; from left to right
    ("leases", Color.ORANGE, ("lease to begin", "lease after a tool", "lease within a turn")),
    ("engine's queue", Color.RED, ("engine's queue",)),
    ("prefill", Color.PURPLE, ("prefill",)),
    ("decode", Color.BLUE, ("decode",)),
    ("tools, grading", Color.GREEN, ("tools", "grading")),
)


def draw_outcomes(outcomes: Sequence[SimulationOutcome], path: Path) -> Path:
    """Draw all outcomes in one figure. Raises OSError."""
    first = outcomes[0]
    bounds = f"no schedule ends before {first.bounds.work_s:.1f} s (all work) or {first.bounds.chain_s:.1f} s (longest chain)"
    again = partial(_draw_recomputed, outcomes)
    panels = [
        *(
            Panel(title, unit, partial(_draw_timeline, outcomes, title, value), percent, "seconds")
            for title, unit, value, percent in _TIMELINES
        ),
        Panel(
            "A trajectory's time", "mean seconds by cause", partial(_draw_times, outcomes), x_label="", headroom=None
        ),
        Panel("Recomputed tokens", "as a share of the generated tokens", again, x_label="", headroom=None),
    ]
    return draw_figure(path, f"{first.workload} on {first.cluster}", f"Dotted: {bounds}", panels, columns=2)


def _draw_timeline(outcomes: Sequence[SimulationOutcome], title: str, value: Value, axes: Axes) -> None:
    for outcome, color in zip(outcomes, cycle(Color), strict=False):
        times = [sample.at_s for sample in outcome.timeline]
        values = [value(outcome, sample) for sample in outcome.timeline]
        axes.plot(times, values, color=color, linewidth=1.6, label=f"{outcome.policy}, {outcome.makespan_s:.1f} s")
        if title == _LIVE:
            axes.plot([outcome.tail.first_end_s], [outcome.tail.trajectories], "o", color=color, markersize=6)
    if title == _LIVE:
        axes.legend(loc="upper right", fontsize=9.5, frameon=False)
    for bound_s in (outcomes[0].bounds.work_s, outcomes[0].bounds.chain_s):
        axes.axvline(bound_s, color="black", linewidth=1, linestyle=":")


def _draw_times(outcomes: Sequence[SimulationOutcome], axes: Axes) -> None:
    """Draw a bar for each policy, the first one at the top."""
    places, begun = _label_bars(axes, outcomes), np.zeros(len(outcomes))
    for label, color, causes in _WAIT_BARS:
        seconds = np.array([sum(each.waits_s[cause] for cause in causes) / each.trajectories for each in outcomes])
        axes.barh(places, seconds, left=begun, color=color, height=0.4, label=label)
        begun += seconds
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=len(_WAIT_BARS),
        frameon=False,
        fontsize=9,
        columnspacing=1.0,
        handlelength=1.0,
    )


def _draw_recomputed(outcomes: Sequence[SimulationOutcome], axes: Axes) -> None:
    places, shares = _label_bars(axes, outcomes), [each.recomputed_tokens / each.generated_tokens for each in outcomes]
    axes.barh(places, shares, color=Color.RED, height=0.4)
    for place, share, each in zip(places, shares, outcomes, strict=True):
        label = f" {share:.1%}: {each.evictions:,} evicted, {each.preemptions:,} preempted, {each.migrations:,} moved"
        axes.text(share, place, label, va="center", fontsize=9)
    axes.set_xlim(0, max(*shares, 0.01) * 2.7)  # leaves room for the labels
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _label_bars(axes: Axes, outcomes: Sequence[SimulationOutcome]) -> list[int]:
    """Label each bar with its policy, and return the positions of the bars from the top."""
    places = list(range(len(outcomes)))[::-1]
    for place, outcome in zip(places, outcomes, strict=True):
        axes.text(0, place + 0.24, f" {outcome.policy}", va="bottom", fontsize=9.5)
    axes.set_yticks([])
    axes.set_ylim(-0.4, len(outcomes) - 0.2)
    return places
