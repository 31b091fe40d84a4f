"""Who something belongs to that can outlive its process: so that the next one to start can sweep what was left."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NUMBERED_IN = Path("/proc/self/ns/pid")


def owner_mark() -> str:
    """This process, told apart from all others of this machine before and after it."""
    return f"{_machine()}/{os.getpid()}/{_started(os.getpid())}"


def is_gone(mark: str) -> bool:
    """Whether the process is known to have ended: it ran on this machine, since its last boot, where its number is known."""
    machine, _, rest = mark.partition("/")
    pid, _, started = rest.partition("/")
    return machine == _machine() and pid.isdigit() and _started(int(pid)) != started


def _machine() -> str:
    """Its boot, and the namespace that numbers processes: executors in two containers may share an engine."""
    return f"{_BOOT.read_text().strip()}:{_NUMBERED_IN.readlink()}"


def _started(pid: int) -> str:
    """In clock ticks since boot; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""
