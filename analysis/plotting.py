"""Draws a figure from a table of panels, all in one style: faint measurements under their moving mean.

panels = [Panel("Entropy", "nats per token", partial(draw_column, steps, "entropy", Color.PURPLE))]
draw_figure(path, "demo", "60 RL steps", panels, columns=3)
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import polars as pl
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from asterism.analysis.metrics import get_column
from asterism.configs.atomic_write import write_atomically


class Color(StrEnum):
    BLUE = "#2b6cb0"
    ORANGE = "#dd7a2b"
    GREEN = "#2f9e6e"
    PURPLE = "#7a5ab5"
    RED = "#c8453b"
    GREY = "#8a94a3"


PALETTE = tuple(color for color in Color if color != Color.GREY)
_INK, _FAINT_INK, _GRID = "#1f2933", "#5b6673", "#e6eaef"
_MOVING_MEAN_STEPS = 5


class Panel(NamedTuple):
    title: str
    unit: str  # what the y axis shows
    draw: Callable[[Axes], object]
    percent: bool = False
    x_label: str = "RL step"
    headroom: float | None = 0.08  # free share above the highest value, on an axis from 0; None: `draw` sets the limits


def draw_figure(
    path: Path,
    title: str,
    subtitle: str,
    panels: Sequence[Panel],
    *,
    columns: int,
    panel_inches: float = 3.25,
    right_margin: float = 0.0,
) -> Path:
    """Draw the panels in reading order, and return the path. Raises OSError and DiskError.

    The figure is 1,800 pixels wide, for a README at half that width. `right_margin` is the space to the right of
    each panel for labels, as a share of the figure's width.
    """
    rows = -(-len(panels) // columns)
    height = panel_inches * rows + 0.75
    figure = Figure(figsize=(12, height), dpi=150, facecolor="white")
    grid = figure.add_gridspec(
        rows,
        columns,
        left=0.055,
        right=0.985 - right_margin,
        top=1 - 1.4 / height,
        bottom=0.58 / height,
        wspace=0.22 + 3.6 * right_margin,
        hspace=0.62,
    )
    figure.text(0.018, 1 - 0.2 / height, title, fontsize=16, fontweight="bold", color=_INK, va="top")
    figure.text(0.018, 1 - 0.52 / height, subtitle, fontsize=11.5, color=_FAINT_INK, va="top")
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        _style_axes(axes, panel)
        panel.draw(axes)
        if panel.headroom is not None:
            highest = axes.dataLim.y1
            axes.set_ylim(0, highest * (1 + panel.headroom) if np.isfinite(highest) and highest > 0 else 1)
    return _save_figure(figure, path)


def _style_axes(axes: Axes, panel: Panel) -> None:
    """Draw title and unit above the panel, and a light grid."""
    axes.set_title(panel.title, loc="left", fontsize=12.5, fontweight="bold", color=_INK, pad=24)
    above = "axes fraction", "offset points"
    axes.annotate(panel.unit, (0, 1), (0, 8), *above, fontsize=10.5, color=_FAINT_INK)
    axes.set_xlabel(panel.x_label, fontsize=10.5, color=_FAINT_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(Color.GREY)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10.5, colors=_FAINT_INK, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def draw_column(steps: pl.DataFrame, name: str, color: str, axes: Axes) -> None:
    draw_line(axes, steps["step"], get_column(steps, name), color)


def draw_line(axes: Axes, steps: pl.Series, values: pl.Series, color: str, label: str | None = None) -> None:
    """Draw the values as a faint line and their moving mean over it, or "not measured"."""
    if values.drop_nulls().is_empty():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=_FAINT_INK, fontsize=11)
        return
    few = steps.len() < 2 * _MOVING_MEAN_STEPS
    mean = values if few else values.rolling_mean(_MOVING_MEAN_STEPS, center=True, min_samples=1)
    axes.plot(steps.to_numpy(), values.to_numpy(), color=color, linewidth=1, alpha=0.3)
    marker = "o" if few else ""
    axes.plot(steps.to_numpy(), mean.to_numpy(), color=color, linewidth=2.2, label=label, marker=marker, markersize=4)


def draw_legend(axes: Axes, place: Literal["lower right", "upper right"] = "lower right") -> None:
    """Draw the legend, by default in the lower right, which rising curves leave free."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=place, fontsize=10, frameon=True, framealpha=0.85, edgecolor="none", labelcolor=_INK)


def _save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure to `path`, and next to a PNG also as SVG. Equal figures give equal files.

    A symbolic link is replaced, not followed.
    """
    with rc_context({"svg.hashsalt": "asterism"}):  # without a salt, the ids in the SVG are random
        for target in (path, path.with_suffix(".svg")) if path.suffix == ".png" else (path,):
            content, extension = BytesIO(), target.suffix.removeprefix(".")
            figure.savefig(content, format=extension, metadata={"Date": None} if extension == "svg" else None)
            write_atomically(target, content.getvalue())
    return path
