"""Draws the metrics of a run's cold start: `runs/NAME/cold_start.png`."""

from pathlib import Path

import polars as pl
from matplotlib.axes import Axes

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import get_column, read_metrics
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

_FILE, _LOSS = "file ", ": loss"  # prefix and suffix of the key of a file's loss


def draw_cold_start(run_folder: Path) -> Path:
    """Draw the figure and return its path. Raises OSError, and AnalysisError without a step of the cold start."""
    metrics = read_metrics(run_folder)
    if metrics.sft.is_empty():
        raise AnalysisError(f"{RunFolder(run_folder).metrics}: no step of the cold start yet")
    figure, panels = make_figure(2, 3, metrics.run, _format_subtitle(metrics.sft))
    _draw_losses(panels[0], metrics.sft)
    _draw_files_or_tokens(panels[1], metrics.sft)
    _draw_column(panels[2], metrics.sft, "grad_norm", "Gradient norm", "before clipping", RED)
    draw_line(panels[3], metrics.sft["step"], get_column(metrics.sft, "lr") * 1e6, PURPLE)
    style_axes(panels[3], "Learning rate", "of AdamW, in millionths", x_label="SFT step")
    _draw_column(panels[4], metrics.sft, "tokens_per_s", "Speed", "tokens/s", GREEN)
    _draw_usage(panels[5], metrics.sft)
    for panel in panels:
        leave_headroom(panel)
    return save_figure(figure, RunFolder(run_folder).cold_start)


def list_file_losses(steps: pl.DataFrame) -> dict[str, pl.Series]:
    """Return each file's loss per step, by name of the file, or nothing without a mixture."""
    names = [each for each in steps.columns if each.startswith(_FILE) and each.endswith(_LOSS)]
    return {name.removeprefix(_FILE).removesuffix(_LOSS): get_column(steps, name) for name in names}


def _format_subtitle(steps: pl.DataFrame) -> str:
    facts = [f"cold start, {format_count(steps.height, 'step')}"]
    measured = get_column(steps, "validation_loss").drop_nulls()
    if len(measured):
        facts.append(f"validation loss {measured[0]:.3f} to {measured[-1]:.3f}")
    return "  ·  ".join(facts)


def _draw_losses(axes: Axes, steps: pl.DataFrame) -> None:
    draw_line(axes, steps["step"], get_column(steps, "loss"), BLUE, "training")
    validated = steps.select("step", get_column(steps, "validation_loss")).drop_nulls()
    if validated.height:
        x, y = validated["step"].to_numpy(), validated["validation_loss"].to_numpy()
        axes.plot(x, y, color=ORANGE, marker="o", markersize=4, linewidth=1.2, label="validation")
        draw_legend(axes, "upper right")
    style_axes(axes, "Loss", "nats per token", x_label="SFT step")


def _draw_files_or_tokens(axes: Axes, steps: pl.DataFrame) -> None:
    files = list_file_losses(steps)
    if not files:
        _draw_column(axes, steps, "tokens", "Tokens of a step", "in the loss", GREY)
        return
    for number, (name, losses) in enumerate(files.items()):
        draw_line(axes, steps["step"], losses, PALETTE[number % len(PALETTE)], name)
    style_axes(axes, "Loss by file", "nats per token, training", x_label="SFT step")
    draw_legend(axes, "upper right")


def _draw_usage(axes: Axes, steps: pl.DataFrame) -> None:
    """Draw the model's FLOP/s as a share of the peak, or the fill of the micro batches if the peak is unknown."""
    if len(get_column(steps, "mfu").drop_nulls()):
        draw_line(axes, steps["step"], get_column(steps, "mfu"), ORANGE)
        style_axes(axes, "Model FLOP/s", "share of the peak of all ranks", percent=True, x_label="SFT step")
        return
    draw_line(axes, steps["step"], get_column(steps, "fill"), ORANGE)
    style_axes(axes, "Fill", "tokens over the room of all micro batches", percent=True, x_label="SFT step")


def _draw_column(axes: Axes, steps: pl.DataFrame, name: str, title: str, unit: str, color: str) -> None:
    draw_line(axes, steps["step"], get_column(steps, name), color)
    style_axes(axes, title, unit, x_label="SFT step")
