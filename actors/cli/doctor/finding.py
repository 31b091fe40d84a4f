"""A finding is the result of one check of `asterism doctor`; a table shows all findings.

A "missing" part is absent, and no run works without it. An "unusable" part is present; `asterism run` refuses it with
the same message. A "warning" is about a part with which some runs fail or are slower.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from rich.table import Table

from asterism.configs.errors import UnusableInput
from asterism.sandbox.contract import SandboxFailure

FindingStatus = Literal["ok", "warning", "missing", "unusable"]

_STYLES: dict[FindingStatus, str] = {"ok": "green", "warning": "yellow", "missing": "bold red", "unusable": "bold red"}


class DoctorFinding(NamedTuple):
    status: FindingStatus
    detail: str
    remedy: str = ""  # one sentence; empty if the status is "ok"

    @property
    def is_refused(self) -> bool:
        """Return whether no run can start."""
        return self.status in ("missing", "unusable")


CheckResult = DoctorFinding | str  # a text is the detail of an "ok" finding


def run_check(check: Callable[[], CheckResult], remedy: str = "", *, ends_run: bool = False) -> DoctorFinding:
    """Turn an UnusableInput or SandboxFailure of the check into "unusable" with this remedy: either would end a run.

    Any other exception becomes a warning, so that other checks still run. With `ends_run`, a run makes the same check
    and would end with the exception, which becomes "unusable" too.
    """
    try:
        result = check()
    except (UnusableInput, SandboxFailure) as error:
        return DoctorFinding("unusable", str(error), remedy)
    except Exception as error:
        detail = f"the check failed: {type(error).__name__}: {error}"
        if ends_run:
            return DoctorFinding("unusable", detail, remedy)
        return DoctorFinding("warning", detail, "Check it by hand; the other findings are valid.")
    return DoctorFinding("ok", result) if isinstance(result, str) else result


def build_findings_table(findings: Mapping[str, DoctorFinding]) -> Table:
    """Build one row for each finding, in the order of the mapping, with the remedy below it."""
    table = Table(title="asterism doctor", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, style="bold")
    table.add_column("", overflow="fold")
    for name, finding in findings.items():
        style = _STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", _escape_markup(name), _escape_markup(finding.detail))
        if finding.remedy:
            table.add_row("", "", f"[italic]-> {_escape_markup(finding.remedy)}[/]")
    return table


def _escape_markup(text: str) -> str:
    return text.replace("[", r"\[")  # the text is output of the machine, not markup
