"""`asterism report`: a run's summary and curves, and where its time went."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from analysis.metrics import read_metrics
from analysis.summary_table import read_summary, summary_table
from analysis.utilization.report import to_json, utilization_of
from analysis.utilization.tables import tables
from configs.errors import UnusableInput
from configs.run_folder import RunFolder


def report_run(path: Path, *, json: bool, console: Console) -> None:
    """Writes the JSON and the pictures into the run's folder. With `json` it prints the JSON and nothing else.

    A run that has not finished has no summary, and a simulated one no metrics: these are left out then. Raises
    UnusableInput if there is no such folder or it has no logs.
    """
    folder = RunFolder(path)
    if not path.is_dir():
        raise UnusableInput(f"{path}: there is no such folder")
    if not json:
        _show_results(folder, console)
    use = utilization_of(folder.logs)
    encoded = to_json(use)
    folder.utilization.write_bytes(encoded)
    from analysis.utilization.picture import draw_utilization  # matplotlib: when there is something to draw

    picture = draw_utilization(use, f"Utilization of {path.resolve().name}", folder.utilization_picture)
    if json:
        console.out(encoded.decode(), end="", highlight=False)
        return
    for table in tables(use):
        console.print(table)
    console.print(f"utilization: {folder.utilization}\npicture: {picture}", markup=False, soft_wrap=True)


def _show_results(folder: RunFolder, console: Console) -> None:
    if folder.summary.exists():
        console.print(summary_table(read_summary(folder.path)))
    if folder.metrics.exists() and read_metrics(folder.path).steps.height:
        from analysis.curves import draw_curves  # as above

        console.print(f"curves: {draw_curves(folder.path)}", markup=False, soft_wrap=True)
