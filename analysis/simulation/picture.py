"""Outcomes side by side: over the step's time who is left, what decodes, how full the caches are and who waits; and where
the time of trajectories went, and what was computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis.plotting import BLUE, GREEN, GREY, ORANGE, PALETTE, PURPLE, RED, dress, leave_headroom, new_figure, save
from analysis.simulation.outcome import Outcome, Sample

_COLORS = (*PALETTE, GREY)
_WAITS: Sequence[tuple[str, str, tuple[str, ...]]] = (  # what stands in Outcome.waits_s, from the left of a bar on
    ("leases", ORANGE, ("lease to begin", "lease after a tool", "lease within a turn")),
    ("engine's queue", RED, ("engine's queue",)),
    ("prefill", PURPLE, ("prefill",)),
    ("decode", BLUE, ("decode",)),
    ("tools, grading", GREEN, ("tools", "grading")),
)


def draw_outcomes(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Raises OSError."""
    first = outcomes[0]
    bounds = f"no schedule ends before {first.bounds.work_s:.1f} s (all work) or {first.bounds.chain_s:.1f} s (longest chain)"
    figure, panels = new_figure(3, 2, f"{first.workload} on {first.cluster}", f"Dotted: {bounds}")
    left, slots, cache, waiting, times, again = panels
    _draw(left, outcomes, lambda outcome, sample: sample.live)
    _draw_ends(left, outcomes)
    dress(left, "Trajectories left", "dot: from there on the last hundredth of them", below="seconds")
    _draw(slots, outcomes, lambda outcome, sample: sample.running / outcome.slots)
    dress(slots, "Decode slots in use", "of all engines'", percent=True, below="seconds")
    _draw(cache, outcomes, lambda outcome, sample: sample.used_tokens / outcome.kv_tokens)
    dress(cache, "KV tokens in use", "of all engines'", percent=True, below="seconds")
    _draw(waiting, outcomes, lambda outcome, sample: sample.leasing + sample.waiting)
    dress(waiting, "Waiting for room", "trajectories without a lease, or queued at an engine", below="seconds")
    for panel in (left, slots, cache, waiting):
        _draw_bounds(panel, first)
        leave_headroom(panel)
    left.legend(loc="upper right", fontsize=9.5, frameon=False)
    _draw_times(times, outcomes)
    _draw_again(again, outcomes)
    return save(figure, path)


def _draw(axes: Axes, outcomes: Sequence[Outcome], value: Callable[[Outcome, Sample], float]) -> None:
    for outcome, color in zip(outcomes, cycle(_COLORS), strict=False):
        times = [sample.at_s for sample in outcome.timeline]
        values = [value(outcome, sample) for sample in outcome.timeline]
        axes.plot(times, values, color=color, linewidth=1.6, label=f"{outcome.policy}, {outcome.makespan_s:.1f} s")


def _draw_ends(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for outcome, color in zip(outcomes, cycle(_COLORS), strict=False):
        axes.plot([outcome.tail.first_end_s], [outcome.tail.trajectories], "o", color=color, markersize=6)


def _draw_bounds(axes: Axes, outcome: Outcome) -> None:
    for bound_s in (outcome.bounds.work_s, outcome.bounds.chain_s):
        axes.axvline(bound_s, color="black", linewidth=1, linestyle=":")


def _draw_times(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """A bar each, the first policy at the top."""
    places, begun = _places(axes, outcomes), np.zeros(len(outcomes))
    for label, color, causes in _WAITS:
        seconds = np.array([sum(each.waits_s[cause] for cause in causes) / each.trajectories for each in outcomes])
        axes.barh(places, seconds, left=begun, color=color, height=0.4, label=label)
        begun += seconds
    _dress_bars(axes, outcomes, "A trajectory's time", "mean seconds, by what it waits for")
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=len(_WAITS),
        frameon=False,
        fontsize=9,
        columnspacing=1.0,
        handlelength=1.0,
    )


def _draw_again(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    places, shares = _places(axes, outcomes), [each.recomputed_tokens / each.generated_tokens for each in outcomes]
    axes.barh(places, shares, color=RED, height=0.4)
    for place, share, each in zip(places, shares, outcomes, strict=True):
        told = f" {share:.1%}: {each.evictions:,} evicted, {each.preemptions:,} preempted, {each.migrations:,} moved"
        axes.text(share, place, told, va="center", fontsize=9)
    _dress_bars(axes, outcomes, "Tokens computed again", "as a share of those generated")
    axes.set_xlim(0, max(*shares, 0.01) * 2.7)  # what is said at the bars' ends has room
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


def _places(axes: Axes, outcomes: Sequence[Outcome]) -> list[int]:
    """Of bars, from the top; each has its policy's name above it."""
    places = list(range(len(outcomes)))[::-1]
    for place, outcome in zip(places, outcomes, strict=True):
        axes.text(0, place + 0.24, f" {outcome.policy}", va="bottom", fontsize=9.5)
    return places


def _dress_bars(axes: Axes, outcomes: Sequence[Outcome], title: str, unit: str) -> None:
    dress(axes, title, unit, below="")
    axes.set_yticks([])
    axes.set_ylim(-0.4, len(outcomes) - 0.2)
