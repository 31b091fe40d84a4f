"""Memory and CPU time of processes, from /proc. The memory of a process that has exited counts as zero."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from asterism.sandbox.inside.server.process_tree import TICK_S, ProcessTree


def list_descendants(ancestors: Iterable[int]) -> list[int]:
    """Return the process ids of `ancestors` and of all their descendants."""
    proc_fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return ProcessTree(proc_fd).list_with_descendants(ancestors)
    finally:
        os.close(proc_fd)


def read_private_mib(pids: Iterable[int]) -> float:
    """Return the total size of the processes' private pages."""
    return sum(_read_kib(pid, ("Private_Clean", "Private_Dirty")) for pid in pids) / 1024


def read_proportional_mib(pids: Iterable[int]) -> float:
    """Return the processes' memory. Each process counts its share of a page that several processes use."""
    return sum(_read_kib(pid, ("Pss",)) for pid in pids) / 1024


def read_resident_mib(pid: int) -> float:
    return _read_kib(pid, ("Rss",)) / 1024


def read_peak_resident_mib(pid: int) -> float:
    """Return the peak of the process's resident memory so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def read_process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of the process's threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _read_kib(pid: int, names: tuple[str, ...]) -> int:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        return sum(int(line.split()[1]) for line in lines if line.partition(":")[0] in names)
    return 0
