"""`asterism report` prints a run's summary, curves and utilization."""

from pathlib import Path

from rich.console import Console

from asterism.analysis.metric_lines import read_metric_lines
from asterism.analysis.run_figures import draw_all_curves
from asterism.analysis.summary_table import build_summary_table, list_health_lines, read_summary
from asterism.analysis.utilization.report import compute_utilization, to_json
from asterism.analysis.utilization.report_tables import build_tables
from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder, StagesFolder


def report_run(path: Path, *, json: bool, console: Console) -> None:
    """Write the JSON and the figures into the run's folder; with `json`, print only the JSON.

    An unfinished run has no summary and a simulated run no metrics; the report omits them. Raises
    UnusableInput if the folder does not exist or has no logs.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        raise UnusableInput(f"{path}: no such folder")
    if (stages := StagesFolder(path)).record.exists():
        _report_stages(stages, json=json, console=console)
        return
    if not json:
        _show_results(folder, console)
    use = compute_utilization(folder.logs)
    encoded = to_json(use)
    write_atomically(folder.utilization, encoded)
    from asterism.analysis.utilization.utilization_figure import draw_utilization  # matplotlib is slow to import

    picture = draw_utilization(use, f"Utilization of {path.resolve().name}", folder.utilization_plot)
    if json:
        console.out(encoded.decode(), end="", highlight=False)
        return
    for table in build_tables(use):
        console.print(table)
    console.print(f"utilization: {folder.utilization}\npicture: {picture}", markup=False, soft_wrap=True)


def _report_stages(folder: StagesFolder, *, json: bool, console: Console) -> None:
    begun = folder.list_begun()
    if json:
        folder.refuse()
    for stage in begun:
        if stage.summary.exists():
            console.print(build_summary_table(read_summary(stage.path)))
        console.print(f"stage: {stage.path}", markup=False, soft_wrap=True)
    from asterism.analysis.stage_curves import draw_stages  # matplotlib is slow to import

    console.print(f"curves of all stages: {draw_stages(folder)}", markup=False, soft_wrap=True)


def _show_results(folder: RunFolder, console: Console) -> None:
    if folder.summary.exists():
        console.print(build_summary_table(read_summary(folder.path)))
    if folder.metrics.exists():  # true also for an unfinished run
        for line in list_health_lines({"health": read_metric_lines(folder.path).health}):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for picture in draw_all_curves(folder):
        console.print(f"curves: {picture}", markup=False, soft_wrap=True)
