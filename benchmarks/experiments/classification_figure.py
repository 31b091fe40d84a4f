"""Draws the shares of calls that each rule counts wrongly, by kind of program."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from asterism.analysis.plotting import BLUE, GREY, ORANGE, make_figure, save_figure, style_axes

_RULES = (
    ("status", "status of the call (here)", BLUE),
    ("release", 'word "error", texts of the release', ORANGE),
    ("release_defaults", 'word "error", default texts', GREY),
)
_BAR_HEIGHT = 0.27
_LABEL_MARGIN = 0.15  # share of the figure's width, left of each panel

SharesByKind = Mapping[str, Mapping[str, float]]


def draw_classification(
    positives: SharesByKind, negatives: SharesByKind, figures: Mapping[str, Any], path: Path
) -> Path:
    """Draw the figure and return its path. Raises OSError."""
    subtitle = (
        f"{figures['right_programs']} programs that look wrong and are right, "
        f"{figures['programs'] - figures['right_programs']} that look right and are wrong  ·  "
        f"{figures['calls']} calls  ·  seeds: {figures['seeds']}"
    )
    figure, panels = make_figure(1, 2, "Which calls count as failed?", subtitle, panel_inches=4.6)
    _draw_shares(panels[0], positives, "False positives", "of the right calls: counted as failed")
    _draw_shares(panels[1], negatives, "False negatives", "of the wrong calls: counted as successful")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper right", fontsize=10, frameon=False)
    for panel in panels:
        box = panel.get_position()
        panel.set_position((box.x0 + _LABEL_MARGIN, box.y0, box.width - _LABEL_MARGIN, box.height))
    path.parent.mkdir(parents=True, exist_ok=True)
    return save_figure(figure, path)


def _draw_shares(axes: Axes, shares: SharesByKind, title: str, unit: str) -> None:
    style_axes(axes, title, unit, x_label="")
    kinds = list(shares)
    for place, (rule, label, color) in enumerate(_RULES):
        lengths = [shares[kind][rule] for kind in kinds]
        rows = [row + (place - 1) * _BAR_HEIGHT for row in range(len(kinds))]
        axes.barh(rows, lengths, _BAR_HEIGHT * 0.9, color=color, label=label)
        for row, length in zip(rows, lengths, strict=True):
            axes.text(length + 0.01, row, f"{length:.0%}", va="center", fontsize=9, color=color)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.4, -0.6)
    axes.set_xlim(0, 1.1)
    axes.set_xticks((0, 0.25, 0.5, 0.75, 1))
    axes.grid(axis="x", visible=False)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
