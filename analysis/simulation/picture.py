"""Outcomes side by side over the step's time: who is left, what decodes, how full the caches are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes

from analysis.plotting import PALETTE, dress, leave_headroom, legend, new_figure, save
from analysis.simulation.outcome import Outcome, Sample


def draw_outcomes(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Raises OSError."""
    first = outcomes[0]
    ends = ", ".join(f"{each.policy} {each.makespan_s:.0f} s" for each in outcomes)
    figure, panels = new_figure(1, 3, f"{first.workload} on {first.cluster}", f"The last trajectory ends: {ends}")
    _draw(panels[0], outcomes, lambda sample: sample.live)
    dress(panels[0], "Trajectories left", "count", below="seconds")
    _draw(panels[1], outcomes, lambda sample: sample.running)
    dress(panels[1], "Sequences that run", "on all engines", below="seconds")
    _draw(panels[2], outcomes, lambda sample: sample.used_tokens / 1e6)
    dress(panels[2], "KV tokens in use", "million, on all engines", below="seconds")
    for panel in panels:
        panel.axvline(first.bounds.lower_s, color="black", linewidth=1, linestyle=":")
        leave_headroom(panel)
    legend(panels[2])
    return save(figure, path)


def _draw(axes: Axes, outcomes: Sequence[Outcome], value: Callable[[Sample], float]) -> None:
    for outcome, color in zip(outcomes, cycle(PALETTE), strict=False):
        times = [sample.at_s for sample in outcome.timeline]
        axes.plot(times, [value(sample) for sample in outcome.timeline], color=color, linewidth=2, label=outcome.policy)
