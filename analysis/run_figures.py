"""Draws the figures of a finished run, if this machine has the packages for figures."""

from collections.abc import Callable
from pathlib import Path

from asterism.analysis.metric_lines import read_metric_lines
from asterism.configs.run_folder import RunFolder, StagesFolder

_PACKAGES = ("polars", "matplotlib")


def draw_all_curves(folder: RunFolder) -> list[Path]:
    """Draw the figures of the cold start and of RL, if the run has begun them.

    Raises AnalysisError, OSError and ModuleNotFoundError.
    """
    if not folder.metrics.exists():
        return []
    metrics = read_metric_lines(folder.path)
    pictures: list[Path] = []
    if metrics.sft:
        from asterism.analysis.cold_start_curves import draw_cold_start  # matplotlib is slow to import

        pictures.append(draw_cold_start(folder.path))
    if metrics.steps:
        from asterism.analysis.curves import draw_curves

        pictures.append(draw_curves(folder.path))
    return pictures


def list_curve_lines(folder: RunFolder) -> list[str]:
    """Return one line per figure, or a line with the name of the missing package. Raises AnalysisError and OSError."""
    return _list_lines(folder.path, lambda: [f"curves: {picture}" for picture in draw_all_curves(folder)])


def list_stage_curve_lines(folder: StagesFolder) -> list[str]:
    """Return the same lines for a run in stages."""

    def draw() -> list[str]:
        from asterism.analysis.stage_curves import draw_stages  # matplotlib is slow to import

        return [f"curves of all stages: {draw_stages(folder)}"]

    return _list_lines(folder.path, draw)


def _list_lines(path: Path, draw: Callable[[], list[str]]) -> list[str]:
    try:
        return draw()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        return [f"no curves: the package {package} is not installed; with it, `asterism report {path}` draws them"]
