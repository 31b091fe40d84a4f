"""Why a process ends that cannot use what it was given: a file, a setting, the disk.

It says so in what it prints and, since a full disk keeps nothing of that, in memory too, where the launcher finds it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import structlog

from configs.errors import UNUSABLE
from configs.run_folder import RunFolder


def words_of(folder: RunFolder, process: str) -> Path:
    return folder.shared_memory / f"{process}.words"


def say_last_words(folder: RunFolder, process: str, error: BaseException) -> None:
    """The first that a process says count: what it cannot do next follows from them."""
    with contextlib.suppress(OSError), words_of(folder, process).open("x") as file:
        file.write(f"{error}\n")
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()


def end_with(folder: RunFolder, process: str, error: BaseException) -> int:
    """The exit code."""
    say_last_words(folder, process, error)
    structlog.get_logger().error("process.failed", exc_info=error)
    return UNUSABLE


def end_at_once(folder: RunFolder, process: str, error: BaseException) -> None:
    """As a kill would: what is not in a log yet nobody knows of."""
    say_last_words(folder, process, error)
    os._exit(UNUSABLE)
