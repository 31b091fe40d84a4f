"""Draws the metrics of one run: `runs/NAME/curves.png`."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from asterism.analysis.metric_lines import compute_token_rate
from asterism.analysis.metrics import RunMetrics, get_column, read_metrics
from asterism.analysis.plotting import PALETTE, Color, Panel, draw_column, draw_figure, draw_legend, draw_line
from asterism.analysis.utilization.step_time import format_count
from asterism.configs.run_folder import RunFolder

_STEP_PHASES = (
    ("rollout_s", "rollout", Color.BLUE),
    ("train_s", "training", Color.ORANGE),
    ("weights_s", "weights", Color.PURPLE),
)
# Sampling, shape, size, color and fill; the larger markers have no fill, so that equal values stay visible.
_EVALUATION_MARKERS = (("sampled", "o", 52, Color.BLUE, Color.BLUE), ("greedy", "D", 110, Color.ORANGE, "none"))
_LEGEND_ROOM = 0.22  # headroom for a legend above the bars


def draw_curves(run_folder: Path) -> Path:
    """Draw the figure and return its path. Raises OSError, and AnalysisError without a step."""
    metrics = read_metrics(run_folder, require_steps=True)
    steps, is_binary = metrics.steps, has_binary_reward(metrics)
    reward = "Reward", "mean over trajectories"
    texts = reward if is_binary else ("Successes", "share of trajectories (evaluation.success)")
    successes = partial(_draw_successes, metrics, "reward" if is_binary else "positive_share")
    errors = partial(draw_column, steps, "errors_in_positives", Color.RED)
    panels = [
        Panel(*texts, successes, percent=True, headroom=None),
        Panel("Tool errors in positives", "share of failed calls in positives", errors, percent=True),
        Panel("Response length", "tokens, mean", partial(draw_column, steps, "response_tokens", Color.GREEN)),
        Panel("Time of a step", "seconds", partial(_draw_time, steps), headroom=_LEGEND_ROOM),
        Panel("Groups of a step", "number", partial(_draw_groups, steps), headroom=_LEGEND_ROOM),
        Panel("Entropy", "nats per token", partial(draw_column, steps, "entropy", Color.PURPLE)),
    ]
    if not is_binary:
        components = "Components of the reward", "mean in training, without weights"
        panels.append(Panel(*reward, partial(_draw_rewards, metrics), headroom=None))
        panels.append(Panel(*components, partial(_draw_components, steps), headroom=None))
    return draw_figure(RunFolder(run_folder).curves, metrics.run, _format_subtitle(metrics), panels, columns=3)


def _format_subtitle(metrics: RunMetrics) -> str:
    steps = metrics.steps
    facts = [format_count(steps.height, "RL step")]
    if (seconds := get_column(steps, "step_s").mean()) is not None:
        facts.append(f"{seconds:.2f} s each")
    if (rate := compute_token_rate(steps.to_dicts())) is not None:
        facts.append(f"{rate:,.0f} tokens/s")
    return "  ·  ".join(facts)


def has_binary_reward(metrics: RunMetrics) -> bool:
    """Return whether each mean reward is the share of successes, so that rewards and accuracies fit on one axis."""
    rewards, shares = (get_column(metrics.steps, name) for name in ("reward", "positive_share"))
    pairs = [*zip(rewards, shares, strict=True)]
    pairs += [(line.get("reward"), line.get("accuracy")) for line in metrics.lines.evaluation_values.values()]
    pairs += [(reward, metrics.lines.step_accuracies.get(step)) for step, reward in metrics.lines.step_rewards.items()]
    return all(
        math.isclose(reward, share, abs_tol=1e-6) for reward, share in pairs if reward is not None and share is not None
    )


def _draw_successes(metrics: RunMetrics, training: str, axes: Axes) -> None:
    _draw_evaluated(axes, metrics, training, metrics.lines.evaluations, metrics.lines.step_accuracies)
    axes.set_ylim(0, 1.05)


def _draw_rewards(metrics: RunMetrics, axes: Axes) -> None:
    rewards = {label: line.get("reward") for label, line in metrics.lines.evaluation_values.items()}
    _draw_evaluated(axes, metrics, "reward", rewards, metrics.lines.step_rewards)


def _draw_components(steps: pl.DataFrame, axes: Axes) -> None:
    names = [name for name in steps.columns if name.startswith("reward: ")]
    for name, color in zip(names, PALETTE, strict=False):
        draw_line(axes, steps["step"], get_column(steps, name), color, name.removeprefix("reward: "))
    draw_legend(axes)


def _draw_evaluated(
    axes: Axes, metrics: RunMetrics, training: str, by_label: Mapping[str, float | None], by_step: Mapping[int, float]
) -> None:
    """Draw the metric `training`, and the values of the evaluations before, during and after RL."""
    steps = metrics.steps
    draw_line(axes, steps["step"], get_column(steps, training), Color.BLUE, "training")
    ends = {"start": int(steps["step"][0]) - 1, "end": int(steps["step"][-1])}
    for sampling, marker, size, color, face in _EVALUATION_MARKERS:
        points = [(ends[end], by_label.get(f"{end}_{sampling}")) for end in ends]
        measured = [(step, value) for step, value in points if value is not None]
        if measured:
            x, y = zip(*measured, strict=True)
            points_drawn = axes.scatter(x, y, marker=marker, s=size, facecolor=face, edgecolor=color, zorder=3)
            points_drawn.set(label=f"test, {sampling}", clip_on=False, linewidth=1.8)
    if by_step:
        x, y = zip(*sorted(by_step.items()), strict=True)
        axes.plot(x, y, color=Color.PURPLE, marker="o", markersize=4, linewidth=1, label="test, during training")
    draw_legend(axes)


def _draw_time(steps: pl.DataFrame, axes: Axes) -> None:
    """Draw the measured parts of each step, and above them the rest of its time."""
    layers = [(get_column(steps, name).fill_null(0.0), label, color, 0.85) for name, label, color in _STEP_PHASES]
    total = get_column(steps, "step_s").fill_null(0.0)
    rest = (total - sum((part for part, *_ in layers), start=total * 0)).clip(lower_bound=0.0)
    _draw_stacked_bars(axes, steps["step"], [*layers, (rest, "other", Color.GREY, 0.85)])


def _draw_groups(steps: pl.DataFrame, axes: Axes) -> None:
    """Draw the groups kept, rejected for equal rewards, and lost to infrastructure."""
    started, rejected, lost = (
        get_column(steps, name).fill_null(0.0) for name in ("groups", "groups_rejected", "groups_lost")
    )
    layers = [
        (started - rejected - lost, "kept", Color.GREEN, 0.85),
        (rejected, "rejected: equal rewards", Color.GREY, 0.6),
    ]
    if lost.sum():
        layers.append((lost, "lost", Color.RED, 0.85))
    _draw_stacked_bars(axes, steps["step"], layers)


def _draw_stacked_bars(axes: Axes, steps: pl.Series, layers: Sequence[tuple[pl.Series, str, str, float]]) -> None:
    """Draw one bar per step. Each layer has heights, a label, a color and an alpha; the first is the lowest."""
    bottom = np.zeros(len(steps))
    for layer, label, color, alpha in layers:
        heights = layer.to_numpy()
        axes.bar(steps.to_numpy(), heights, 1.0, bottom=bottom, color=color, label=label, alpha=alpha, linewidth=0)
        bottom = bottom + heights
    axes.legend(loc="upper right", ncols=4, fontsize=9.5, frameon=False, columnspacing=1, handlelength=0.9)
