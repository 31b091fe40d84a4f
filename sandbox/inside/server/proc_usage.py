"""Reads the CPU time, run-queue delay and memory of a call's processes from /proc."""

import os
import time

from sandbox.inside.server.process_tree import ProcessTree

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED = 2  # kernel constant: with a pid, the id of a process's CPU clock


class ProcessUsage:
    """Counts memory beyond that of the zygote. Values of an ended process are 0 or empty."""

    def __init__(self, processes: ProcessTree, zygote_pid: int) -> None:
        self._processes = processes
        self._zygote_bytes = self._read_resident_bytes(zygote_pid)
        self._num_oom_kills = self._count_oom_kills()

    def read_schedule(self, pid: int) -> tuple[float, float]:
        """(seconds on a CPU, seconds runnable without one) of its first thread, since its start."""
        fields = self._processes.read_file(pid, "schedstat").split()
        return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if fields else (0.0, 0.0)

    def read_state(self, pid: int) -> bytes:
        """The state of its first thread: R runs or is runnable, S sleeps."""
        return self._processes.read_file(pid, "stat").rpartition(b") ")[2][:1]

    def has_children(self, pid: int) -> bool:
        """Whether its first thread has children."""
        return bool(self._processes.read_file(pid, f"task/{pid}/children"))

    def list_process_tree(self, pid: int) -> list[int]:
        """The process and its descendants; all of them if it is process 1 of a pid namespace."""
        return self._processes.list_with_descendants([pid])

    def measure_cpu_s(self, pids: list[int]) -> float:
        """Total CPU time of all their threads."""
        total = 0.0
        for pid in pids:
            try:
                total += time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
            except OSError:
                continue
        return total

    def measure_memory(self, pids: list[int], limit: int) -> int:
        """Bytes beyond the zygote's memory per process. Above `limit`, shared pages count once."""
        used = sum(self._compute_own_bytes(pid) for pid in pids)
        return used if used <= limit else sum(self._read_proportional_bytes(pid) for pid in pids)

    def take_oom_kill(self) -> bool:
        """Whether the kernel killed a process for memory. True once for each of its kills.

        The kernel's counter is the machine's and names no process.
        """
        if self._count_oom_kills() <= self._num_oom_kills:
            return False
        self._num_oom_kills += 1
        return True

    def _count_oom_kills(self) -> int:
        lines = self._processes.read_machine_file("vmstat").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)

    def _read_proportional_bytes(self, pid: int) -> int:
        """Its proportional set size, which divides a page by its users; else its own pages."""
        for line in self._processes.read_file(pid, "smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
        return self._compute_own_bytes(pid)

    def _compute_own_bytes(self, pid: int) -> int:
        return max(0, self._read_resident_bytes(pid) - self._zygote_bytes)

    def _read_resident_bytes(self, pid: int) -> int:
        fields = self._processes.read_file(pid, "statm").split()
        return int(fields[1]) * _PAGE_BYTES if fields else 0
