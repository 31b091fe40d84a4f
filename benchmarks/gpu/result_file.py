"""Reads and writes the file of results: one JSON line for each section, written as soon as the section has ended.

The error of a part of a section is the figure PART_error; the section's own error is `error`.
"""

import datetime
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from traceback import format_exception
from typing import Any

from benchmarks.gpu.process_group import MAX_ERROR, ROOT, Finished

Figures = dict[str, float | str]
MACHINE = "machine"  # the section with the facts of the machine
_ERROR = "error"
_FRAMES = -8  # number of kept frames of a traceback; negative: its last frames
_SENT = "figures: "  # prefix of a line with figures in a section's output


def measure_parts(parts: Mapping[str, Callable[[], Figures]]) -> Figures:
    """Measure the independent parts of a section. A failed part has PART_error instead of figures.

    All figures so far are printed after each part, because a later part might be killed. Raises SystemExit
    if all parts fail.
    """
    figures: Figures = {}
    failures: Figures = {}
    for name, measure in parts.items():
        try:
            figures |= measure()
        except (Exception, SystemExit) as error:  # a failed part must not lose the figures of the other parts
            failures[f"{name}_{_ERROR}"] = "".join(format_exception(error, limit=_FRAMES)).strip()[-MAX_ERROR:]
        if figures:
            send_figures(figures | failures)
    if len(failures) == len(parts):
        raise SystemExit("\n".join(f"{name}: {text}" for name, text in failures.items()))
    return figures | failures


def send_figures(figures: Figures) -> None:
    """Print the figures for the program that started the section."""
    print(_SENT + json.dumps(figures), flush=True)


def find_figures(finished: Finished, limit_s: float) -> Figures:
    """Return the figures that a section sent last, and an error if the section failed or was killed at its limit."""
    sent = [line.removeprefix(_SENT) for line in finished.output.splitlines() if line.startswith(_SENT)]
    figures: Figures = json.loads(sent[-1]) if sent else {}
    if finished.code == 0 and sent:
        return figures
    error = finished.last_error
    if finished.code is None:
        error = f"no result after {limit_s:.1f} s" + (f": {error}" if error else "")
    return {**figures, f"end_{_ERROR}": error} if sent else {_ERROR: error}


def has_failed(figures: Mapping[str, Any]) -> bool:
    """Return whether a section or a part of it has an error."""
    return any(name == _ERROR or name.endswith((f"_{_ERROR}", f".{_ERROR}")) for name in figures)


def append_result(path: Path | None, section: str, figures: Figures, seconds: float, facts: Mapping[str, Any]) -> None:
    """Append a line, and sync it to the disk. `facts` are common to all results of one call."""
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
    """Return the last figures of each section without a failed part. An incomplete last line is ignored."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Figures] = {}
    for text in path.read_text().splitlines(keepends=True):
        if not text.endswith("\n"):
            break
        line: dict[str, Any] = json.loads(text)
        is_complete = "figures" in line and not has_failed(line["figures"])
        if is_complete and line["section"] != MACHINE and line["quick"] == is_quick:
            found[line["section"]] = line["figures"]
    return found


def read_commit() -> str:
    """Return the checkout's commit, with "-dirty" for uncommitted changes; empty without git or a repository."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
