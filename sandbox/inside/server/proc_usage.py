"""Reads the CPU time, run-queue delay and memory of a call's processes from /proc."""

import os
import time
from collections.abc import Mapping

from asterism.sandbox.inside.isolation.namespaces import SCRATCH
from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.server.starvation import ThreadTimes, list_thread_times

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_BUFFER_BYTES = {"socket": 212_992, "pipe": 65_536}  # the kernel's defaults, which a call cannot raise
_CPUCLOCK_SCHED = 2  # kernel constant: with a pid, the id of a process's CPU clock
_MAX_MEASUREMENT_S = 0.1  # CPU time for measuring the shared pages of one call
_MAX_MAPS_BYTES = 256 << 10  # text of some 3000 mappings; with more, a process's shared pages count once per process


class ProcessUsage:
    """Measures processes. Memory of the zygote does not count. Values of an ended process are 0 or empty."""

    def __init__(self, processes: ProcessTree, zygote_pid: int) -> None:
        self._processes = processes
        self._zygote_bytes = self._read_resident_bytes(zygote_pid)
        self._num_oom_kills = self._count_oom_kills()

    def read_schedule(self, pid: int) -> tuple[float, float]:
        """Return (seconds on a CPU, seconds runnable without one) of the first thread, since its start."""
        fields = self._processes.read_file(pid, "schedstat").split()
        return (int(fields[0]) / 1e9, int(fields[1]) / 1e9) if fields else (0.0, 0.0)

    def read_state(self, pid: int) -> bytes:
        """Return the state of the first thread: R runs or is runnable, S sleeps."""
        return self._processes.read_file(pid, "stat").rpartition(b") ")[2][:1]

    def has_children(self, pid: int) -> bool:
        """Return whether the first thread has children."""
        return bool(self._processes.read_file(pid, f"task/{pid}/children"))

    def list_process_tree(self, pid: int) -> list[int]:
        """Return the process and its descendants: all processes of the namespace, if it is process 1."""
        return self._processes.list_with_descendants([pid])

    def measure_cpu_s(self, pids: list[int]) -> float:
        """Return the total CPU time of all threads of the processes."""
        total = 0.0
        for pid in pids:
            try:
                total += time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
            except OSError:
                continue
        return total

    def list_thread_times(
        self, pid: int, before: Mapping[int, tuple[float, float]], since_s: float
    ) -> list[ThreadTimes]:
        """Return the times of the threads of the process tree (asterism.sandbox.inside.server.starvation)."""
        return list_thread_times(self._processes, self.list_process_tree(pid), before, since_s)

    def measure_memory(self, pids: list[int], limit: int) -> int:
        """Return the bytes beyond the zygote's memory per process. Above `limit`, shared pages count once.

        The kernel counts shared pages one mapping at a time, and a process may have 65,530 mappings. After
        `_MAX_MEASUREMENT_S`, the shared pages of the remaining processes count once per process.
        """
        own_bytes = {pid: self._compute_own_bytes(pid) for pid in pids}
        used = sum(own_bytes.values()) + self._measure_buffers(pids)
        began_s = time.thread_time()
        for pid in sorted(pids, key=lambda pid: -own_bytes[pid]):
            if used <= limit or time.thread_time() - began_s > _MAX_MEASUREMENT_S:
                break
            used -= own_bytes[pid] - min(own_bytes[pid], self._read_proportional_bytes(pid))
        return used

    def count_kernel_objects(self, pids: list[int], *, by_user: bool) -> dict[str, int]:
        """Count the byte-range locks of the processes: kernel memory that no limit and no cgroup counts.

        With `by_user`, also count what the kernel counts by user: pipes, epoll watches, descriptors in flight.
        """
        counts = {"lock": 0, "pipe": 0, "watch": 0, "in flight": 0}
        pipes: set[str] = set()
        for pid in pids:
            for fd, target in self._processes.list_descriptors(pid).items():
                if target.startswith("/"):
                    counts["lock"] += self._read_descriptor(pid, fd).count(b"\nlock:")
                elif target.startswith("pipe:"):
                    pipes.add(target)
                elif by_user and target == "anon_inode:[eventpoll]":
                    counts["watch"] += self._read_descriptor(pid, fd).count(b"\ntfd:")
                elif by_user and target.startswith("socket:"):
                    _, _, number = self._read_descriptor(pid, fd).partition(b"\nscm_fds:")
                    counts["in flight"] += int(number.split()[0]) if number else 0
        return {**counts, "pipe": len(pipes)}

    def _read_descriptor(self, pid: int, fd: str) -> bytes:
        return self._processes.read_file(pid, f"fdinfo/{fd}")

    def _measure_buffers(self, pids: list[int]) -> int:
        """Return the bytes that pipes and sockets can hold, or 0 for one process, which RLIMIT_NOFILE bounds."""
        if len(pids) == 1:
            return 0
        targets = {target for pid in pids for target in self._processes.list_descriptors(pid).values()}
        return sum(_BUFFER_BYTES.get(target.partition(":")[0], 0) for target in targets)

    def take_oom_kill(self) -> bool:
        """Return whether the kernel killed a process for memory, once for each kill.

        The kernel counts the kills of the whole machine and names no process.
        """
        if self._count_oom_kills() <= self._num_oom_kills:
            return False
        self._num_oom_kills += 1
        return True

    def _count_oom_kills(self) -> int:
        lines = self._processes.read_machine_file("vmstat").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)

    def measure_notebooks(self, pids: dict[int, int]) -> dict[int, int]:
        """Return the bytes of each notebook's processes, and of its folder if it is a mount, which uses memory."""
        return {
            notebook_id: sum(map(self._compute_own_bytes, self.list_process_tree(pid)))
            + self._processes.measure_folder(pid, SCRATCH)
            for notebook_id, pid in pids.items()
        }

    def _read_proportional_bytes(self, pid: int) -> int:
        """Return the proportional set size: each page is split among its users. With many mappings, count own pages."""
        if len(self._processes.read_file(pid, "maps", _MAX_MAPS_BYTES)) >= _MAX_MAPS_BYTES:
            return self._compute_own_bytes(pid)
        for line in self._processes.read_file(pid, "smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
        return self._compute_own_bytes(pid)

    def _compute_own_bytes(self, pid: int) -> int:
        return max(0, self._read_resident_bytes(pid) - self._zygote_bytes)

    def _read_resident_bytes(self, pid: int) -> int:
        fields = self._processes.read_file(pid, "statm").split()
        return int(fields[1]) * _PAGE_BYTES if fields else 0
