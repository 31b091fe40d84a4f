"""What a check of `asterism doctor` found, and the table of it. "missing" means that the run does not work without it;
"warning" that some runs do not, or do worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from rich.table import Table

Status = Literal["ok", "warning", "missing"]

GIB = 2**30
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "missing": "bold red"}


class Finding(msgspec.Struct, frozen=True):
    name: str
    status: Status
    detail: str  # what was found
    remedy: str = ""  # one sentence; empty where nothing is lacking


def find(name: str, check: Callable[[], Finding]) -> Finding:
    """A machine odd enough to break a check still gets all the others' answers."""
    try:
        return check()
    except Exception as error:
        detail = f"could not be examined: {type(error).__name__}: {error}"
        return Finding(name, "warning", detail, "Examine it by hand; the other findings stand.")


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row for each finding, its remedy beneath what was found."""
    table = Table(title="asterism doctor", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, style="bold")
    table.add_column("", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", _plain(finding.name), _plain(finding.detail))
        if finding.remedy:
            table.add_row("", "", f"[italic]-> {_plain(finding.remedy)}[/]")
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")  # what a machine answers is text and no markup
