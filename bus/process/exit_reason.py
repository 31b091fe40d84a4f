"""The exit reason of a process: the error that ended it, for the launcher.

The process prints the reason and also writes it to shared memory, where the launcher reads it: a
full disk cannot store the printed output.
"""

import contextlib
import os
import sys
from pathlib import Path

from configs.errors import EXIT_UNUSABLE
from configs.run_folder import RunFolder


def exit_reason_path(folder: RunFolder, process: str) -> Path:
    """On a tmpfs. The launcher deletes the file before it starts the process."""
    return folder.shared_memory / f"{process}.words"


def write_exit_reason(folder: RunFolder, process: str, error: BaseException) -> None:
    """Write the first error of a process; later errors are consequences of it and are ignored."""
    with contextlib.suppress(OSError), exit_reason_path(folder, process).open("x") as file:
        file.write(f"{error}\n")
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()


def exit_now(folder: RunFolder, process: str, error: BaseException) -> None:
    """Write the exit reason and exit like a killed process; unlogged events are lost."""
    write_exit_reason(folder, process, error)
    os._exit(EXIT_UNUSABLE)


def load_exit_reason(path: Path) -> str:
    """The content of the file at `exit_reason_path`; empty if the process wrote none."""
    try:
        return path.read_text().rstrip()
    except FileNotFoundError:
        return ""


def read_exit_reason(output_path: Path, reason_path: Path, max_lines: int = 12) -> str:
    """The last `max_lines` of the process's output, or its exit reason if a full disk lost the output."""
    output = output_path.read_text(errors="replace").rstrip() if output_path.exists() else ""
    printed = "\n".join(output.splitlines()[-max_lines:])
    reason = load_exit_reason(reason_path)
    return printed if reason in printed else reason
