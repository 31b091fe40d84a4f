"""Memory of processes, from /proc. Processes that end in between count as nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def descendants(ancestors: Iterable[int]) -> list[int]:
    """The processes themselves and all that come from them."""
    found: list[int] = []
    new = list(ancestors)
    while new:
        found += new
        new = [child for pid in new for child in _children(pid)]
    return found


def _children(pid: int) -> list[int]:
    text = ""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            text += (task / "children").read_text()
    return [int(child) for child in text.split()]


def private_mib(pids: Iterable[int]) -> float:
    """Pages that belong to one process alone, summed."""
    return sum(_kib(pid, ("Private_Clean", "Private_Dirty")) for pid in pids) / 1024


def shared_out_mib(pids: Iterable[int]) -> float:
    """All pages, each divided among those that share it: what the processes take together."""
    return sum(_kib(pid, ("Pss",)) for pid in pids) / 1024


def resident_mib(pid: int) -> float:
    return _kib(pid, ("Rss",)) / 1024


def peak_resident_mib(pid: int) -> float:
    """The most so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _kib(pid: int, names: tuple[str, ...]) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        return sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in names)
    return 0
