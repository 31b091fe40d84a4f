"""The metrics of a run as data frames, for figures. Programs without polars use `asterism.analysis.metric_lines`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from asterism.analysis.metric_lines import AnalysisError, RunLines, read_metric_lines
from asterism.configs.run_folder import RunFolder, StagesFolder


class RunMetrics(NamedTuple):
    run: str  # name of the folder
    steps: pl.DataFrame  # one row per RL step, in order
    sft: pl.DataFrame  # one row per step of the cold start, in order
    lines: RunLines


def read_metrics(run_folder: Path, *, require_steps: bool = False) -> RunMetrics:
    """Read a run's metrics. The later line of a step counts, for example after a resume. Raises AnalysisError."""
    lines = read_metric_lines(run_folder)
    if require_steps and not lines.steps:
        raise AnalysisError(f"{RunFolder(run_folder).metrics}: no RL step yet")
    return RunMetrics(run_folder.resolve().name, _build_frame(lines.steps), _build_frame(lines.sft), lines)


class StageSteps(NamedTuple):
    name: str
    first: int  # number of steps before the stage
    steps: pl.DataFrame


def read_stage_steps(folder: StagesFolder) -> list[StageSteps]:
    """Read the steps of the stages that have begun RL. Raises AnalysisError, OSError and msgspec.MsgspecError."""
    stages: list[StageSteps] = []
    first = 0
    for stage in folder.list_begun():
        if not stage.metrics.exists():
            continue
        steps = read_metrics(stage.path).steps
        if steps.height:
            stages.append(StageSteps(stage.path.name.partition("_")[2], first, steps))
            first += steps.height
    return stages


def get_column(frame: pl.DataFrame, name: str) -> pl.Series:
    """Return the column as float64, with only nulls if no line has the key."""
    if name not in frame.columns:
        return pl.Series(name, [None] * frame.height, dtype=pl.Float64)
    return frame[name].cast(pl.Float64)


def _build_frame(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, infer_schema_length=None) if rows else pl.DataFrame({"step": []})
