"""The result of one check of `asterism doctor`, and the table of all results.

"missing": no run works without it. "warning": some runs fail or are slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rich.table import Table

FindingStatus = Literal["ok", "warning", "missing"]

GIB = 2**30
_STYLES: dict[FindingStatus, str] = {"ok": "green", "warning": "yellow", "missing": "bold red"}


class CheckResult(NamedTuple):
    status: FindingStatus
    detail: str
    remedy: str = ""  # one sentence; empty if the status is "ok"


class DoctorFinding(NamedTuple):
    name: str
    status: FindingStatus
    detail: str
    remedy: str = ""


def run_check(name: str, check: Callable[[], CheckResult]) -> DoctorFinding:
    """Turns an exception of the check into a warning, so that the other checks still run."""
    try:
        return DoctorFinding(name, *check())
    except Exception as error:
        detail = f"the check failed: {type(error).__name__}: {error}"
        return DoctorFinding(name, "warning", detail, "Check it by hand; the other findings are valid.")


def build_findings_table(findings: Sequence[DoctorFinding]) -> Table:
    """One row for each finding, with the remedy below it."""
    table = Table(title="asterism doctor", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, style="bold")
    table.add_column("", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", _escape_markup(finding.name), _escape_markup(finding.detail))
        if finding.remedy:
            table.add_row("", "", f"[italic]-> {_escape_markup(finding.remedy)}[/]")
    return table


def _escape_markup(text: str) -> str:
    return text.replace("[", r"\[")  # output of the machine, not markup
