"""Reads from /proc which processes exist."""

import contextlib
import os
import select
from pathlib import Path


def list_children(pid: int) -> list[int]:
    """Return the children of all threads of the process; empty if it has ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process ended in the meantime
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def family(*ancestors: int) -> list[int]:
    """Return the processes and all of their descendants."""
    found, new = list(ancestors), list(ancestors)
    while new:
        new = [child for pid in new for child in list_children(pid)]
        found += new
    return found


def process_state(pid: int) -> str:
    """Return the state of the main thread as a letter of proc(5), or X if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_running(pid: int) -> bool:
    return process_state(pid) not in "ZX"


def processes_that_name(text: str) -> list[str]:
    """Return the command lines of other processes that contain `text`."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and int(entry.parent.name) != os.getpid():
                found.append(line)
    return found


def wait_for_end(pidfd: int) -> None:
    """Wait for the end of the process, and close `pidfd`."""
    try:
        assert select.select([pidfd], [], [], 30)[0], "a process is still there"
    finally:
        os.close(pidfd)
