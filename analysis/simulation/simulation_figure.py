"""Draw simulation outcomes: live trajectories, slots, caches and waits over time; time by cause; recomputed tokens."""

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from asterism.analysis.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    RED,
    leave_headroom,
    make_figure,
    save_figure,
    style_axes,
)
from asterism.analysis.simulation.outcome import SimulationOutcome, TimelineSample

_COLORS = (*PALETTE, GREY)
_WAIT_BARS: Sequence[tuple[str, str, tuple[str, ...]]] = (  # label, color, keys of waits_s; from left to right
    ("leases", ORANGE, ("lease to begin", "lease after a tool", "lease within a turn")),
    ("engine's queue", RED, ("engine's queue",)),
    ("prefill", PURPLE, ("prefill",)),
    ("decode", BLUE, ("decode",)),
    ("tools, grading", GREEN, ("tools", "grading")),
)


def draw_outcomes(outcomes: Sequence[SimulationOutcome], path: Path) -> Path:
    """Draw all outcomes in one figure. Raises OSError."""
    first = outcomes[0]
    bounds = f"no schedule ends before {first.bounds.work_s:.1f} s (all work) or {first.bounds.chain_s:.1f} s (longest chain)"
    figure, panels = make_figure(3, 2, f"{first.workload} on {first.cluster}", f"Dotted: {bounds}")
    left, slots, cache, waiting, times, again = panels
    _draw_timelines(left, outcomes, lambda outcome, sample: sample.live)
    _draw_ends(left, outcomes)
    style_axes(left, "Live trajectories", "dot: the last hundredth begins to end", x_label="seconds")
    _draw_timelines(slots, outcomes, lambda outcome, sample: sample.running / outcome.slots)
    style_axes(slots, "Decode slots in use", "share of all engines' slots", percent=True, x_label="seconds")
    _draw_timelines(cache, outcomes, lambda outcome, sample: sample.used_tokens / outcome.kv_tokens)
    style_axes(cache, "KV tokens in use", "share of all engines' capacity", percent=True, x_label="seconds")
    _draw_timelines(waiting, outcomes, lambda outcome, sample: sample.leasing + sample.waiting)
    style_axes(waiting, "Waiting for room", "trajectories without a lease, or queued at an engine", x_label="seconds")
    for panel in (left, slots, cache, waiting):
        _draw_bounds(panel, first)
        leave_headroom(panel)
    left.legend(loc="upper right", fontsize=9.5, frameon=False)
    _draw_times(times, outcomes)
    _draw_recomputed(again, outcomes)
    return save_figure(figure, path)


def _draw_timelines(
    axes: Axes, outcomes: Sequence[SimulationOutcome], value: Callable[[SimulationOutcome, TimelineSample], float]
) -> None:
    for outcome, color in zip(outcomes, cycle(_COLORS), strict=False):
        times = [sample.at_s for sample in outcome.timeline]
        values = [value(outcome, sample) for sample in outcome.timeline]
        axes.plot(times, values, color=color, linewidth=1.6, label=f"{outcome.policy}, {outcome.makespan_s:.1f} s")


def _draw_ends(axes: Axes, outcomes: Sequence[SimulationOutcome]) -> None:
    for outcome, color in zip(outcomes, cycle(_COLORS), strict=False):
        axes.plot([outcome.tail.first_end_s], [outcome.tail.trajectories], "o", color=color, markersize=6)


def _draw_bounds(axes: Axes, outcome: SimulationOutcome) -> None:
    for bound_s in (outcome.bounds.work_s, outcome.bounds.chain_s):
        axes.axvline(bound_s, color="black", linewidth=1, linestyle=":")


def _draw_times(axes: Axes, outcomes: Sequence[SimulationOutcome]) -> None:
    """Draw a bar for each policy, the first one at the top."""
    places, begun = _label_bars(axes, outcomes), np.zeros(len(outcomes))
    for label, color, causes in _WAIT_BARS:
        seconds = np.array([sum(each.waits_s[cause] for cause in causes) / each.trajectories for each in outcomes])
        axes.barh(places, seconds, left=begun, color=color, height=0.4, label=label)
        begun += seconds
    _style_bars(axes, outcomes, "A trajectory's time", "mean seconds by cause")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=len(_WAIT_BARS),
        frameon=False,
        fontsize=9,
        columnspacing=1.0,
        handlelength=1.0,
    )


def _draw_recomputed(axes: Axes, outcomes: Sequence[SimulationOutcome]) -> None:
    places, shares = _label_bars(axes, outcomes), [each.recomputed_tokens / each.generated_tokens for each in outcomes]
    axes.barh(places, shares, color=RED, height=0.4)
    for place, share, each in zip(places, shares, outcomes, strict=True):
        label = f" {share:.1%}: {each.evictions:,} evicted, {each.preemptions:,} preempted, {each.migrations:,} moved"
        axes.text(share, place, label, va="center", fontsize=9)
    _style_bars(axes, outcomes, "Recomputed tokens", "as a share of the generated tokens")
    axes.set_xlim(0, max(*shares, 0.01) * 2.7)  # leaves room for the labels
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _label_bars(axes: Axes, outcomes: Sequence[SimulationOutcome]) -> list[int]:
    """Label each bar with its policy, and return the positions of the bars from the top."""
    places = list(range(len(outcomes)))[::-1]
    for place, outcome in zip(places, outcomes, strict=True):
        axes.text(0, place + 0.24, f" {outcome.policy}", va="bottom", fontsize=9.5)
    return places


def _style_bars(axes: Axes, outcomes: Sequence[SimulationOutcome], title: str, unit: str) -> None:
    style_axes(axes, title, unit, x_label="")
    axes.set_yticks([])
    axes.set_ylim(-0.4, len(outcomes) - 0.2)
