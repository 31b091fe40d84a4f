"""Draws the metrics of one run: `runs/NAME/curves.png`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from asterism.analysis.metric_lines import compute_token_rate
from asterism.analysis.metrics import RunMetrics, get_column, read_metrics
from asterism.analysis.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    RED,
    draw_legend,
    draw_line,
    leave_headroom,
    make_figure,
    save_figure,
    style_axes,
)
from asterism.analysis.utilization.step_time import format_count
from asterism.configs.run_folder import RunFolder

_STEP_PHASES = (
    ("rollout_s", "rollout", BLUE),
    ("train_s", "training", ORANGE),
    ("weights_s", "weights", PURPLE),
)


def draw_curves(run_folder: Path) -> Path:
    """Draw the figure and return its path. Raises OSError, and AnalysisError without a step."""
    metrics = read_metrics(run_folder, require_steps=True)
    steps = metrics.steps
    is_binary = has_binary_reward(metrics)
    figure, panels = make_figure(2 if is_binary else 3, 3, metrics.run, _format_subtitle(metrics))
    _draw_share_of_successes(panels[0], metrics, "reward" if is_binary else "positive_share")
    draw_line(panels[1], steps["step"], get_column(steps, "errors_in_positives"), RED)
    draw_line(panels[2], steps["step"], get_column(steps, "response_tokens"), GREEN)
    _draw_time(panels[3], steps)
    _draw_groups(panels[4], steps)
    draw_line(panels[5], steps["step"], get_column(steps, "entropy"), PURPLE)
    if is_binary:
        style_axes(panels[0], "Reward", "mean over trajectories", percent=True)
    else:
        style_axes(panels[0], "Successes", "share of trajectories (evaluation.success)", percent=True)
        _draw_shaped_reward(panels[6:], metrics)
    style_axes(panels[1], "Tool errors in positives", "share of failed calls in positives", percent=True)
    style_axes(panels[2], "Response length", "tokens, mean")
    style_axes(panels[3], "Time of a step", "seconds")
    style_axes(panels[4], "Groups of a step", "number")
    style_axes(panels[5], "Entropy", "nats per token")
    for panel in (panels[1], panels[2], panels[5]):
        leave_headroom(panel)
    for panel in (panels[3], panels[4]):
        leave_headroom(panel, 0.22)  # space for the legend above the bars
    return save_figure(figure, RunFolder(run_folder).curves)


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
    pairs += [(line.get("reward"), line.get("accuracy")) for line in metrics.evaluation_values.values()]
    pairs += [(reward, metrics.step_accuracies.get(step)) for step, reward in metrics.step_rewards.items()]
    return all(
        math.isclose(reward, share, abs_tol=1e-6) for reward, share in pairs if reward is not None and share is not None
    )


def _draw_share_of_successes(axes: Axes, metrics: RunMetrics, training: str) -> None:
    """Draw the metric `training`, and the accuracies of the evaluations before, during and after RL."""
    steps = metrics.steps
    draw_line(axes, steps["step"], get_column(steps, training), BLUE, "training")
    _draw_evaluations(axes, metrics, metrics.evaluations, metrics.step_accuracies)
    axes.set_ylim(0, 1.05)
    draw_legend(axes)


def _draw_shaped_reward(panels: Sequence[Axes], metrics: RunMetrics) -> None:
    """Draw the mean rewards of training and evaluations, and the components' means; the third panel stays empty."""
    axes, components, empty = panels
    steps = metrics.steps
    draw_line(axes, steps["step"], get_column(steps, "reward"), BLUE, "training")
    rewards = {label: line.get("reward") for label, line in metrics.evaluation_values.items()}
    _draw_evaluations(axes, metrics, rewards, metrics.step_rewards)
    style_axes(axes, "Reward", "mean over trajectories")
    names = [name for name in steps.columns if name.startswith("reward: ")]
    for name, color in zip(names, PALETTE, strict=False):
        draw_line(components, steps["step"], get_column(steps, name), color, name.removeprefix("reward: "))
    style_axes(components, "Components of the reward", "mean in training, without weights")
    for panel in (axes, components):
        panel.set_ylim(auto=True)
        panel.autoscale(axis="y")
        draw_legend(panel)
    empty.set_axis_off()


def _draw_evaluations(
    axes: Axes, metrics: RunMetrics, by_label: Mapping[str, float | None], by_step: Mapping[int, float]
) -> None:
    steps = metrics.steps
    ends = {"start": int(steps["step"][0]) - 1, "end": int(steps["step"][-1])}
    # The larger markers have no fill, so that equal values stay visible.
    for sampling, marker, size, color, face in (("sampled", "o", 52, BLUE, BLUE), ("greedy", "D", 110, ORANGE, "none")):
        points = [(ends[end], by_label.get(f"{end}_{sampling}")) for end in ends]
        measured = [(step, value) for step, value in points if value is not None]
        if measured:
            x, y = zip(*measured, strict=True)
            points_drawn = axes.scatter(x, y, marker=marker, s=size, facecolor=face, edgecolor=color, zorder=3)
            points_drawn.set(label=f"test, {sampling}", clip_on=False, linewidth=1.8)
    if by_step:
        x, y = zip(*sorted(by_step.items()), strict=True)
        axes.plot(x, y, color=PURPLE, marker="o", markersize=4, linewidth=1, label="test, during training")


def _draw_time(axes: Axes, steps: pl.DataFrame) -> None:
    """Draw the measured parts of each step, and above them the rest of its time."""
    layers = [(get_column(steps, name).fill_null(0.0), label, color, 0.85) for name, label, color in _STEP_PHASES]
    total = get_column(steps, "step_s").fill_null(0.0)
    rest = (total - sum((part for part, *_ in layers), start=total * 0)).clip(lower_bound=0.0)
    _draw_stacked_bars(axes, steps["step"], [*layers, (rest, "other", GREY, 0.85)])


def _draw_groups(axes: Axes, steps: pl.DataFrame) -> None:
    """Draw the groups kept, rejected for equal rewards, and lost to infrastructure."""
    started, rejected, lost = (
        get_column(steps, name).fill_null(0.0) for name in ("groups", "groups_rejected", "groups_lost")
    )
    layers = [(started - rejected - lost, "kept", GREEN, 0.85), (rejected, "rejected: equal rewards", GREY, 0.6)]
    if lost.sum():
        layers.append((lost, "lost", RED, 0.85))
    _draw_stacked_bars(axes, steps["step"], layers)


def _draw_stacked_bars(axes: Axes, steps: pl.Series, layers: Sequence[tuple[pl.Series, str, str, float]]) -> None:
    """Draw one bar per step. Each layer has heights, a label, a color and an alpha; the first is the lowest."""
    bottom = np.zeros(len(steps))
    for layer, label, color, alpha in layers:
        heights = layer.to_numpy()
        axes.bar(steps.to_numpy(), heights, 1.0, bottom=bottom, color=color, label=label, alpha=alpha, linewidth=0)
        bottom = bottom + heights
    axes.legend(loc="upper right", ncols=4, fontsize=9.5, frameon=False, columnspacing=1, handlelength=0.9)
