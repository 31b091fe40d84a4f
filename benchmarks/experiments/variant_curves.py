"""Draws the curves of an experiment's variants: the mean of the seeds, and a band of one standard error."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from asterism.analysis.plotting import Color, Panel, draw_figure, draw_legend
from benchmarks.experiments.recorded_runs import RecordedRun

_PANELS = (  # key in metrics.jsonl, title, unit, percent
    ("reward", "Reward", "mean of all rollouts", False),
    ("errors_in_positives", "Tool errors in right answers", "share of calls that failed", True),
    ("response_tokens", "Response length", "tokens", False),
    ("overlong_share", "At the length limit", "share of rollouts", True),
)


def draw_variants(title: str, curves: Mapping[str, Sequence[RecordedRun]], seeds: int, path: Path) -> Path:
    """Draw the mean curves. `curves` maps each label to the runs of its seeds. Raises OSError."""
    band = ", band: one standard error" if seeds > 1 else ""
    subtitle = f"mean of the seeds 0 to {seeds - 1}{band}" if seeds > 1 else "seed 0"
    panels = [Panel(name, unit, partial(_draw_means, curves, key), percent) for key, name, unit, percent in _PANELS]
    return draw_figure(path, title, subtitle, panels, columns=2)


def _draw_means(curves: Mapping[str, Sequence[RecordedRun]], key: str, axes: Axes) -> None:
    for (variant, runs), color in zip(curves.items(), cycle(Color), strict=False):
        _draw_mean(axes, stack_seeds(runs, key), color, variant)
    if key == _PANELS[0][0]:
        draw_legend(axes)


def stack_seeds(runs: Sequence[RecordedRun], key: str) -> NDArray[np.float64]:
    """Return [seeds, steps], up to the last step that all runs have. A step without the key is nan."""
    columns = [np.array(run.curves[key], np.float64) for run in runs]  # None becomes nan
    steps = min(len(column) for column in columns)
    return np.stack([column[:steps] for column in columns])


def _draw_mean(axes: Axes, values_SN: NDArray[np.float64], color: str, label: str) -> None:
    """Draw the mean of S seeds over N steps. The curve has a gap where a seed has no value."""
    seeds = len(values_SN)
    steps, mean = np.arange(1, values_SN.shape[1] + 1), values_SN.mean(axis=0)
    axes.plot(steps, mean, color=color, linewidth=2, label=label)
    if seeds > 1:
        error = values_SN.std(axis=0, ddof=1) / np.sqrt(seeds)
        axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)
