"""Draws the metrics of a run's cold start: `runs/NAME/cold_start.png`."""

from functools import partial
from pathlib import Path

import polars as pl
from matplotlib.axes import Axes

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import get_column, read_metrics
from asterism.analysis.plotting import PALETTE, Color, Panel, draw_column, draw_figure, draw_legend, draw_line
from asterism.analysis.utilization.step_time import format_count
from asterism.configs.run_folder import RunFolder

_FILE, _LOSS = "file ", ": loss"  # prefix and suffix of the key of a file's loss


def draw_cold_start(run_folder: Path) -> Path:
    """Draw the figure and return its path. Raises OSError, and AnalysisError without a step of the cold start."""
    metrics = read_metrics(run_folder)
    if metrics.sft.is_empty():
        raise AnalysisError(f"{RunFolder(run_folder).metrics}: no step of the cold start yet")
    steps = metrics.sft
    panels = [
        Panel("Loss", "nats per token", partial(_draw_losses, steps)),
        _make_file_or_token_panel(steps),
        Panel("Gradient norm", "before clipping", partial(draw_column, steps, "grad_norm", Color.RED)),
        Panel("Learning rate", "of AdamW, in millionths", partial(_draw_learning_rate, steps)),
        Panel("Speed", "tokens/s", partial(draw_column, steps, "tokens_per_s", Color.GREEN)),
        _make_usage_panel(steps),
    ]
    panels = [panel._replace(x_label="SFT step") for panel in panels]
    return draw_figure(RunFolder(run_folder).cold_start, metrics.run, _format_subtitle(steps), panels, columns=3)


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


def _draw_losses(steps: pl.DataFrame, axes: Axes) -> None:
    draw_line(axes, steps["step"], get_column(steps, "loss"), Color.BLUE, "training")
    validated = steps.select("step", get_column(steps, "validation_loss")).drop_nulls()
    if validated.height:
        x, y = validated["step"].to_numpy(), validated["validation_loss"].to_numpy()
        axes.plot(x, y, color=Color.ORANGE, marker="o", markersize=4, linewidth=1.2, label="validation")
        draw_legend(axes, "upper right")


def _draw_learning_rate(steps: pl.DataFrame, axes: Axes) -> None:
    draw_line(axes, steps["step"], get_column(steps, "lr") * 1e6, Color.PURPLE)


def _make_file_or_token_panel(steps: pl.DataFrame) -> Panel:
    files = list_file_losses(steps)
    if not files:
        return Panel("Tokens of a step", "in the loss", partial(draw_column, steps, "tokens", Color.GREY))

    def draw(axes: Axes) -> None:
        for number, (name, losses) in enumerate(files.items()):
            draw_line(axes, steps["step"], losses, PALETTE[number % len(PALETTE)], name)
        draw_legend(axes, "upper right")

    return Panel("Loss by file", "nats per token, training", draw)


def _make_usage_panel(steps: pl.DataFrame) -> Panel:
    """Show the model's FLOP/s as a share of the peak, or the fill of the micro batches if the peak is unknown."""
    if len(get_column(steps, "mfu").drop_nulls()):
        name, title, unit = "mfu", "Model FLOP/s", "share of the peak of all ranks"
    else:
        name, title, unit = "fill", "Fill", "tokens over the room of all micro batches"
    return Panel(title, unit, partial(draw_column, steps, name, Color.ORANGE), percent=True)
