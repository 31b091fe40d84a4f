"""The results of finished runs, one line of JSON for each: figures, curves, commit and recipe.

A line outlives the run's folder. So an experiment continues without the folders, and a file of results can be part of a
repository.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from asterism.analysis.metric_lines import read_metric_lines
from asterism.analysis.metrics import get_column, read_metrics
from asterism.analysis.summary_table import read_summary
from benchmarks.experiments.planned_runs import PlannedRun
from benchmarks.gpu.result_file import read_commit

SUMMARY_FIGURES = (
    *("pass1_start", "pass1_end", "greedy_end", "reward_end", "err_positive_end", "response_tokens_end"),
    "wall_s",
)
CURVES = ("reward", "errors_in_positives", "response_tokens", "overlong_share", "entropy")
_LAST_STEPS = 20  # steps that overlong_share_end averages: the share is small, so a few steps would be noisy
_PLACES = ("runs_folder=", "name=", "data.train=", "data.test=")  # settings that only place the run


class RecordedRun(NamedTuple):
    variant: str
    seed: int
    recipe: str  # digest of what the run computes: see compute_recipe
    commit: str
    replay_identical: bool | None
    figures: Mapping[str, float | None]
    curves: Mapping[str, Sequence[float | None]]  # per RL step


def compute_recipe(planned: PlannedRun, config: Path) -> str:
    """Return a digest of the configuration, its settings, and the Python files beside it that it names.

    Of a model's folder, only the name counts.
    """
    settings = [_drop_parents(each) for each in planned.settings if not each.startswith(_PLACES)]
    text = config.read_text()
    programs = sorted(config.parent.glob("*.py")) if ".py:" in text else ()
    parts = [text.encode(), json.dumps(settings).encode(), *(each.read_bytes() for each in programs)]
    return sha256(b"".join(parts)).hexdigest()[:12]


def _drop_parents(setting: str) -> str:
    key, _, value = setting.partition("=")
    return f"{key}={Path(value).name}" if key == "model.checkpoint" else setting


def read_recorded(path: Path) -> list[RecordedRun]:
    """Read the lines. Raises OSError and ValueError, except for a file that does not exist."""
    if not path.exists():
        return []
    return [RecordedRun(**json.loads(line)) for line in path.read_text().splitlines()]


def find_recorded(recorded: Sequence[RecordedRun], planned: PlannedRun, config: Path) -> RecordedRun | None:
    """Return the newest line of this run."""
    wanted = (planned.variant, planned.seed, compute_recipe(planned, config))
    return next((run for run in reversed(recorded) if (run.variant, run.seed, run.recipe) == wanted), None)


def record_run(planned: PlannedRun, config: Path, path: Path) -> RecordedRun:
    """Append the line of a finished run. Raises AnalysisError and OSError."""
    summary, steps = dict(read_summary(planned.folder) or {}), read_metrics(planned.folder).steps
    figures = {name: summary.get(name) for name in SUMMARY_FIGURES} | _read_set_figures(planned.folder)
    overlong = get_column(steps, "overlong_share").tail(_LAST_STEPS).mean()
    figures["overlong_share_end"] = None if overlong is None else float(overlong)  # pyright: ignore[reportArgumentType]
    run = RecordedRun(
        planned.variant,
        planned.seed,
        compute_recipe(planned, config),
        read_commit(),
        summary.get("replay_identical"),
        {name: _shorten(value) for name, value in figures.items()},
        {key: [_shorten(value) for value in get_column(steps, key)] for key in CURVES},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(run._asdict()) + "\n")
    return run


def _read_set_figures(folder: Path) -> dict[str, float | None]:
    """Return each set's accuracy before and after RL, and its standard error over the questions."""
    lines, figures = read_metric_lines(folder).evaluation_values, dict[str, float | None]()
    for when in ("start", "end"):
        for key, value in lines.get(f"{when}_sampled", {}).items():
            name, _, figure = key.removeprefix("set ").partition(": ")
            if key.startswith("set ") and figure in ("accuracy", "standard_error"):
                figures[f"{name}_{when}" + ("_error" if figure == "standard_error" else "")] = value
    return figures


def _shorten(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
