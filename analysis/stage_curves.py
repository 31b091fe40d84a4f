"""Draws the metrics of a run with [[stages]] over all of its stages: `runs/NAME/stages.png`."""

from pathlib import Path

from matplotlib.axes import Axes

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import StageSteps, get_column, read_stage_steps
from asterism.analysis.plotting import (
    BLUE,
    GREEN,
    GREY,
    RED,
    draw_line,
    leave_headroom,
    make_figure,
    save_figure,
    style_axes,
)
from asterism.analysis.utilization.step_time import format_count
from asterism.configs.run_folder import StagesFolder

_PANELS = (
    ("reward", "Reward", "mean over trajectories", BLUE, True),
    ("response_tokens", "Response length", "tokens, mean", GREEN, False),
    ("overlong_share", "Responses at the length limit", "share of trajectories", RED, True),
)


def draw_stages(folder: StagesFolder) -> Path:
    """Draw all stages and return the figure's path. Raises OSError, and AnalysisError without a step."""
    stages = read_stage_steps(folder)
    if not stages:
        raise AnalysisError(f"{folder.path}: no RL step yet")
    num_steps = sum(stage.steps.height for stage in stages)
    subtitle = f"{format_count(len(stages), 'stage')}  ·  {format_count(num_steps, 'RL step')}"
    figure, panels = make_figure(1, 3, folder.path.resolve().name, subtitle)
    for panel, (column, title, unit, color, is_share) in zip(panels, _PANELS, strict=True):
        for stage in stages:
            steps = stage.steps["step"] - stage.steps["step"][0] + stage.first + 1
            draw_line(panel, steps, get_column(stage.steps, column), color)
        style_axes(panel, title, unit, percent=is_share, x_label="RL step of all stages")
        leave_headroom(panel, 0.15)
        _mark_stages(panel, stages)
    return save_figure(figure, folder.curves)


def _mark_stages(axes: Axes, stages: list[StageSteps]) -> None:
    for stage in stages:
        if stage.first:
            axes.axvline(stage.first + 0.5, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            stage.name,
            (stage.first + 1, 1),
            (2, -4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=9.5,
            color=GREY,
            va="top",
        )
