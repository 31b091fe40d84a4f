"""What a call takes, as its fork server sees it in /proc: processor time, waiting, memory. Standard library only."""

import os
import time

from sandbox.inside.process_tree import ProcessTree

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CPU_CLOCK_OF_PROCESS = 2  # the kernel's CPUCLOCK_SCHED: with a pid it makes the number of that process's clock


class Usage:
    """`template` is the process that calls are copied from, with all that it maps. Of one that has ended, everything is nothing."""

    def __init__(self, processes: ProcessTree, template: int) -> None:
        self._processes = processes
        self._inherited = self._resident(template)

    def schedule(self, pid: int) -> tuple[float, float]:
        """(seconds on a processor, seconds ready to run without one) of the process's first thread, since its start."""
        fields = self._processes.read(pid, "schedstat").split()
        return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if fields else (0.0, 0.0)

    def state(self, pid: int) -> bytes:
        """Of its first thread: R runs or is ready to, S waits for something else."""
        return self._processes.read(pid, "stat").rpartition(b") ")[2][:1]

    def has_started_others(self, pid: int) -> bool:
        """Whether its first thread has living children."""
        return bool(self._processes.read(pid, f"task/{pid}/children"))

    def family(self, pid: int) -> list[int]:
        """The process, and all that descend from it. From a pid namespace whose first process it is, nothing gets away."""
        return [pid, *self._processes.descendants(pid)]

    def cpu_s(self, pids: list[int]) -> float:
        """Processor time of all their threads together."""
        total = 0.0
        for pid in pids:
            try:
                total += time.clock_gettime((~pid << 3) | _CPU_CLOCK_OF_PROCESS)
            except OSError:
                continue
        return total

    def memory(self, pids: list[int], limit: int) -> int:
        """Bytes that they hold beyond what each has from the template. Above `limit`, what they share counts once."""
        held = sum(self._own(pid) for pid in pids)
        return held if held <= limit else sum(self._share(pid) for pid in pids)

    def _share(self, pid: int) -> int:
        """Its share of its pages, each divided by how many processes have it; all of them where it hides that."""
        for line in self._processes.read(pid, "smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
        return self._own(pid)

    def _own(self, pid: int) -> int:
        return max(0, self._resident(pid) - self._inherited)

    def _resident(self, pid: int) -> int:
        fields = self._processes.read(pid, "statm").split()
        return int(fields[1]) * _PAGE if fields else 0
