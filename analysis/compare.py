"""Compares several runs in one figure: `python -m asterism.analysis.compare RUN RUN... --into FOLDER`.

Writes FOLDER/curves.png (reward, tool errors in positives, response length: the central figure of the
rStar2-Agent report) and FOLDER/summary.json, the runs' summaries by folder name.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

import msgspec
import polars as pl
from matplotlib.axes import Axes

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import RunMetrics, get_column, read_metrics
from asterism.analysis.plotting import PALETTE, Panel, draw_figure, draw_legend, draw_line
from asterism.analysis.summary import AVERAGED_STEPS
from asterism.analysis.summary_table import read_summary
from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.run_folder import RunFolder

_DISPLAY_NAMES = {"roc": "GRPO-RoC", "grpo": "GRPO"}  # label of each run of the ablation, by folder name
_PANELS = (  # key in metrics.jsonl, title, unit, percent; the first one has the legend
    ("reward", "Reward", "mean over trajectories", True),
    ("errors_in_positives", "Tool errors in positives", "share of failed calls in positives", True),
    ("response_tokens", "Response length", "tokens, mean", False),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asterism.analysis.compare", description="Compare several runs in one figure."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/ablation/roc")
    parser.add_argument(
        "--into", required=True, type=Path, metavar="FOLDER", help="folder for curves.png, curves.svg and summary.json"
    )
    given = parser.parse_args(arguments)
    try:
        compare_runs(given.runs, given.into)
    except (AnalysisError, OSError) as error:
        sys.stderr.write(f"compare: {error}\n")
        return EXIT_UNUSABLE
    return 0


def compare_runs(run_folders: Sequence[Path], output_folder: Path) -> tuple[Path, Path]:
    """Return the paths of the figure and of the summary. Raises AnalysisError before it writes, and OSError."""
    runs = [read_metrics(folder, require_steps=True) for folder in run_folders]
    names = [run.run for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise AnalysisError(f"need two or more runs with different folder names, got: {', '.join(names)}")
    summaries = {run.run: read_summary(folder) for run, folder in zip(runs, run_folders, strict=True)}
    output_folder.mkdir(parents=True, exist_ok=True)
    output = RunFolder(output_folder)
    write_atomically(output.summary, msgspec.json.format(msgspec.json.encode(summaries), indent=2) + b"\n")
    return _draw(runs, output.curves), output.summary


def _draw(runs: Sequence[RunMetrics], path: Path) -> Path:
    title = " and ".join(_get_label(run) for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    panels = [
        Panel(name, unit, partial(_draw_panel, runs, key, percent), percent) for key, name, unit, percent in _PANELS
    ]
    subtitle = _format_subtitle(runs)
    return draw_figure(path, title, subtitle, panels, columns=len(panels), panel_inches=3.75, right_margin=0.04)


def _draw_panel(runs: Sequence[RunMetrics], key: str, percent: bool, axes: Axes) -> None:
    """Draw one line per run, with its final value in the right margin."""
    columns = [get_column(run.steps, key) for run in runs]
    ends = [_compute_final_mean(values) for values in columns]
    for index, (run, values, color) in enumerate(zip(runs, columns, cycle(PALETTE), strict=False)):
        draw_line(axes, run.steps["step"], values, color, _get_label(run))
        end = ends[index]
        if end is None:
            continue
        axes.annotate(
            f"{end:.1%}" if percent else f"{end:.0f}",
            (1, end),
            (5, _compute_label_offset(ends, index, axes.dataLim.y1)),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=color,
            fontsize=11,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )
    if key == _PANELS[0][0]:
        draw_legend(axes)


def _compute_label_offset(final_values: Sequence[float | None], run_index: int, highest: float) -> float:
    """Return the vertical offset in points that keeps the labels of close line ends apart."""
    known = [end if end is not None else 0.0 for end in final_values]
    if max(known) - min(known) > 0.1 * highest:
        return 0.0
    rank = sorted(range(len(known)), key=lambda index: known[index]).index(run_index)
    return (rank - (len(known) - 1) / 2) * 14


def _compute_final_mean(values: pl.Series) -> float | None:
    mean = values.tail(AVERAGED_STEPS).mean()
    return mean if isinstance(mean, float) else None


def _get_label(run: RunMetrics) -> str:
    return _DISPLAY_NAMES.get(run.run, run.run)


def _format_subtitle(runs: Sequence[RunMetrics]) -> str:
    steps = {run.steps.height for run in runs}
    return f"{max(steps)} RL steps; numbers are means over the last {min(AVERAGED_STEPS, *steps)}"


if __name__ == "__main__":
    sys.exit(main())
