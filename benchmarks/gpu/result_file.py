"""The file of results: one JSON line for each section, written as soon as the section has ended."""

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.process_group import ROOT

Figures = dict[str, float | str]
MACHINE = "machine"  # the section with the facts of the machine


def append_result(path: Path | None, section: str, figures: Figures, seconds: float, facts: Mapping[str, Any]) -> None:
    """On the disk when the call returns. `facts`: what all results of one call have in common."""
    if path is None:
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"error": figures["error"]} if "error" in figures else {"figures": figures}
    line = {"section": section, **result, "seconds": round(seconds, 2), "date": now, **facts}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_results(path: Path | None, *, is_quick: bool) -> dict[str, Figures]:
    """The last figures of each section; sections that failed have none. An incomplete last line does not count."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Figures] = {}
    for text in path.read_text().splitlines(keepends=True):
        if not text.endswith("\n"):
            break
        line: dict[str, Any] = json.loads(text)
        if "figures" in line and line["section"] != MACHINE and line["quick"] == is_quick:
            found[line["section"]] = line["figures"]
    return found


def read_commit() -> str:
    """Of the checkout; empty if it has no repository, or changes that are not committed are unknown."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
