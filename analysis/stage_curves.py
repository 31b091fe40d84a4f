"""Draws the metrics of a run with [[stages]] over all of its stages: `runs/NAME/stages.png`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import StageSteps, get_column, read_stage_steps
from asterism.analysis.plotting import Color, Panel, draw_figure, draw_line
from asterism.analysis.utilization.step_time import format_count
from asterism.configs.run_folder import StagesFolder

_PANELS = (
    ("reward", "Reward", "mean over trajectories", Color.BLUE, True),
    ("response_tokens", "Response length", "tokens, mean", Color.GREEN, False),
    ("overlong_share", "Responses at the length limit", "share of trajectories", Color.RED, True),
)


def draw_stages(folder: StagesFolder) -> Path:
    """Draw all stages and return the figure's path. Raises OSError, and AnalysisError without a step."""
    stages = read_stage_steps(folder)
    if not stages:
        raise AnalysisError(f"{folder.path}: no RL step yet")
    num_steps = sum(stage.steps.height for stage in stages)
    subtitle = f"{format_count(len(stages), 'stage')}  ·  {format_count(num_steps, 'RL step')}"
    panels = [
        Panel(
            title, unit, partial(_draw_column, stages, column, color), percent, "RL step of all stages", headroom=0.15
        )
        for column, title, unit, color, percent in _PANELS
    ]
    return draw_figure(folder.curves, folder.path.resolve().name, subtitle, panels, columns=3)


def _draw_column(stages: Sequence[StageSteps], column: str, color: Color, axes: Axes) -> None:
    """Draw the column of all stages one after another, with a mark and a name at each start."""
    for stage in stages:
        steps = stage.steps["step"] - stage.steps["step"][0] + stage.first + 1
        draw_line(axes, steps, get_column(stage.steps, column), color)
        if stage.first:
            axes.axvline(stage.first + 0.5, color=Color.GREY, linewidth=1, linestyle=":")
        axes.annotate(
            stage.name,
            (stage.first + 1, 1),
            (2, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9.5,
            color=Color.GREY,
            va="top",
        )
