"""One run in one picture: `runs/NAME/curves.png`."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes

from analysis.metrics import AnalysisError, Metrics, column, read_metrics
from analysis.plotting import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    draw_line,
    dress,
    leave_headroom,
    legend,
    new_figure,
    save,
)
from configs.run_folder import RunFolder

_PARTS = (
    ("rollout_s", "rollout", BLUE),
    ("train_s", "training", ORANGE),
    ("weights_s", "weights", PURPLE),
)


def draw_curves(run_folder: Path) -> Path:
    """Raises AnalysisError where there is no step to draw, OSError where the picture cannot be written."""
    metrics = read_metrics(run_folder)
    steps = metrics.steps
    if steps.is_empty():
        raise AnalysisError(f"{RunFolder(run_folder).metrics}: no RL step in it yet")
    figure, panels = new_figure(2, 3, metrics.run, _subtitle(metrics))
    _draw_reward(panels[0], metrics)
    draw_line(panels[1], steps["step"], column(steps, "errors_in_positives"), RED)
    draw_line(panels[2], steps["step"], column(steps, "response_tokens"), GREEN)
    _draw_time(panels[3], steps)
    _draw_groups(panels[4], steps)
    draw_line(panels[5], steps["step"], column(steps, "entropy"), PURPLE)
    dress(panels[0], "Reward", "share of answers that are right", percent=True)
    dress(panels[1], "Tool errors in positives", "share of calls that failed", percent=True)
    dress(panels[2], "Response length", "tokens, mean")
    dress(panels[3], "Time of a step", "seconds")
    dress(panels[4], "Groups of a step", "number")
    dress(panels[5], "Entropy", "nats per token")
    for panel in (panels[1], panels[2], panels[5]):
        leave_headroom(panel)
    for panel in (panels[3], panels[4]):
        leave_headroom(panel, 0.22)  # for the legend above the bars
    return save(figure, RunFolder(run_folder).curves)


def _subtitle(metrics: Metrics) -> str:
    steps = metrics.steps
    facts = [f"{steps.height} RL steps"]
    if (seconds := column(steps, "step_s").mean()) is not None:
        facts.append(f"{seconds:.2f} s each")
    if (rate := column(steps, "tokens_per_s").mean()) is not None:
        facts.append(f"{rate:,.0f} tokens/s")
    return "  ·  ".join(facts)


def _draw_reward(axes: Axes, metrics: Metrics) -> None:
    """The training reward, and the evaluations at both ends."""
    steps = metrics.steps
    draw_line(axes, steps["step"], column(steps, "reward"), BLUE, "training")
    ends = {"start": int(steps["step"][0]) - 1, "end": int(steps["step"][-1])}
    for way, marker, color in (("sampled", "o", BLUE), ("greedy", "D", ORANGE)):
        points = [(ends[end], metrics.evaluations.get(f"{end}_{way}")) for end in ends]
        measured = [(step, accuracy) for step, accuracy in points if accuracy is not None]
        if measured:
            x, y = zip(*measured, strict=True)
            label = f"test, {way}"
            axes.scatter(
                x, y, marker=marker, s=52, color=color, edgecolor="white", zorder=3, label=label, clip_on=False
            )
    axes.set_ylim(0, 1.05)
    legend(axes)


def _draw_time(axes: Axes, steps: pl.DataFrame) -> None:
    """Stacked: the parts that are measured, then what is left of the step."""
    total = column(steps, "step_s").fill_null(0.0)
    parts = [column(steps, name).fill_null(0.0) for name, _, _ in _PARTS]
    rest = (total - sum(parts, start=total * 0)).clip(lower_bound=0.0)
    layers = [part.to_numpy() for part in (*parts, rest)]
    labels = [*(label for _, label, _ in _PARTS), "other"]
    colors = [*(color for _, _, color in _PARTS), GREY]
    x = steps["step"].to_numpy()
    bottom = layers[0] * 0
    for layer, label, color in zip(layers, labels, colors, strict=True):
        axes.bar(x, layer, 1.0, bottom=bottom, color=color, label=label, linewidth=0, alpha=0.85)
        bottom = bottom + layer
    axes.legend(loc="upper right", ncols=4, fontsize=9.5, frameon=False, columnspacing=1, handlelength=0.9)


def _draw_groups(axes: Axes, steps: pl.DataFrame) -> None:
    """Groups that were trained on, rejected because all their rewards were equal, and lost to infrastructure."""
    started, rejected, lost = (
        column(steps, name).fill_null(0.0) for name in ("groups", "groups_rejected", "groups_lost")
    )
    layers = [(started - rejected - lost, "kept", GREEN, 0.85), (rejected, "rejected: equal rewards", GREY, 0.6)]
    if lost.sum():
        layers.append((lost, "lost", RED, 0.85))
    bottom = started.to_numpy() * 0
    for layer, label, color, alpha in layers:
        heights = layer.to_numpy()
        axes.bar(
            steps["step"].to_numpy(), heights, 1.0, bottom=bottom, color=color, label=label, alpha=alpha, linewidth=0
        )
        bottom = bottom + heights
    axes.legend(loc="upper right", ncols=3, fontsize=9.5, frameon=False, columnspacing=1, handlelength=0.9)
