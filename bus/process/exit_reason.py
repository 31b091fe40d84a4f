"""The exit reason of a process that cannot use a file, a setting or the disk.

The process prints the reason and also writes it to shared memory, where the launcher reads it: a
full disk cannot store the printed output.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from configs.errors import EXIT_UNUSABLE
from configs.run_folder import RunFolder


def exit_reason_path(folder: RunFolder, process: str) -> Path:
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
