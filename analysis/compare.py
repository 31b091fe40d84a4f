"""Several runs in one picture: `python -m analysis.compare RUN RUN... --into FOLDER`.

Writes FOLDER/curves.png (reward, tool errors in positives, response length: the report's central figure) and
FOLDER/summary.json, the runs' summaries under the names of their folders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import msgspec
import polars as pl
from matplotlib.axes import Axes

from analysis.metrics import AnalysisError, Metrics, column, read_metrics
from analysis.plotting import PALETTE, draw_line, dress, leave_headroom, legend, new_figure, save
from analysis.summary_table import read_summary
from configs.errors import UNUSABLE
from configs.run_folder import RunFolder

_NAMES = {"roc": "GRPO-RoC", "grpo": "GRPO"}  # of the ablation's folders
_LAST = 10  # steps that the figures at the lines' ends are the mean of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.compare", description="Several runs in one picture.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, such as runs/ablation/roc")
    parser.add_argument("--into", required=True, type=Path, metavar="FOLDER", help="where to write both files")
    given = parser.parse_args(arguments)
    try:
        compare(given.runs, given.into)
    except (AnalysisError, OSError) as error:
        sys.stderr.write(f"compare: {error}\n")
        return UNUSABLE
    return 0


def compare(run_folders: Sequence[Path], into: Path) -> tuple[Path, Path]:
    """The picture's path and the summary's. Raises AnalysisError before anything is written, and OSError."""
    runs = [_read_run(folder) for folder in run_folders]
    names = [run.run for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise AnalysisError(f"two or more runs in folders of different names are needed, got: {', '.join(names)}")
    summaries = {run.run: read_summary(folder) for run, folder in zip(runs, run_folders, strict=True)}
    into.mkdir(parents=True, exist_ok=True)
    place = RunFolder(into)
    place.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summaries), indent=2) + b"\n")
    return _draw(runs, place.curves), place.summary


def _read_run(folder: Path) -> Metrics:
    metrics = read_metrics(folder)
    if metrics.steps.is_empty():
        raise AnalysisError(f"{RunFolder(folder).metrics}: no RL step in it yet")
    return metrics


def _draw(runs: Sequence[Metrics], path: Path) -> Path:
    title = " and ".join(_label(run) for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    figure, panels = new_figure(1, 3, title, _subtitle(runs), panel_inches=3.75, beside=0.04)
    keys = ("reward", "errors_in_positives", "response_tokens")
    for panel, key in zip(panels, keys, strict=True):
        _draw_panel(panel, runs, key, percent=key != "response_tokens")
    dress(panels[0], "Reward", "share of answers that are right", percent=True)
    dress(panels[1], "Tool errors in positives", "share of the calls in right answers that failed", percent=True)
    dress(panels[2], "Response length", "tokens, mean")
    for panel in panels:
        leave_headroom(panel)
    legend(panels[0])
    return save(figure, path)


def _draw_panel(axes: Axes, runs: Sequence[Metrics], key: str, *, percent: bool) -> None:
    """A line for each run, and beside the panel what it ends at."""
    columns = [column(run.steps, key) for run in runs]
    ends = [_end(values) for values in columns]
    for place, (run, values, color) in enumerate(zip(runs, columns, cycle(PALETTE), strict=False)):
        draw_line(axes, run.steps["step"], values, color, _label(run))
        end = ends[place]
        if end is None:
            continue
        axes.annotate(
            f"{end:.1%}" if percent else f"{end:.0f}",
            (1, end),
            (5, _nudge(ends, place, axes.dataLim.y1)),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=color,
            fontsize=11,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )


def _nudge(ends: Sequence[float | None], place: int, highest: float) -> float:
    """Points up or down, so that the figures of lines that end side by side do not lie on one another."""
    known = [end if end is not None else 0.0 for end in ends]
    if max(known) - min(known) > 0.1 * highest:
        return 0.0
    rank = sorted(range(len(known)), key=lambda index: known[index]).index(place)
    return (rank - (len(known) - 1) / 2) * 14


def _end(values: pl.Series) -> float | None:
    mean = values.tail(_LAST).mean()
    return mean if isinstance(mean, float) else None


def _label(run: Metrics) -> str:
    return _NAMES.get(run.run, run.run)


def _subtitle(runs: Sequence[Metrics]) -> str:
    steps = {run.steps.height for run in runs}
    return f"{max(steps)} RL steps; the figures are means over the last {min(_LAST, *steps)}"


if __name__ == "__main__":
    sys.exit(main())
