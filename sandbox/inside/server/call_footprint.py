"""Measures the resources of a call's processes: memory, locks, and objects that the kernel counts by user."""

import os
import sys

from asterism.sandbox.inside.server.call_cgroups import MAX_MEMORY_FACTOR
from asterism.sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from asterism.sandbox.inside.server.proc_usage import ProcessUsage

CHECK_INTERVAL_S, _MIN_CHECK_INTERVAL_S = 0.05, 0.005
_GROWTH_BYTES_PER_S = 1 << 30  # largest growth of the processes on one CPU
_MAX_OVERSHOOT = 0.25  # allowed excess between two measurements, as a share of the memory limit
_MAX_LOCKS = 1024  # byte-range locks of all processes of a call
_CHECKPOINT_CPU_S = 0.005  # total CPU time of an idle checkpoint; a process with more has computed
# Limits of a call that shares its kernel user; the limit of watches also applies to a call without a cgroup. The
# kernel allows a user some 1,024 full-size pipes, as many descriptors in flight as a call's limit of open files, and
# millions of epoll watches.
_MAX_SHARED_OBJECTS = {"pipe": 64, "in flight": 32, "watch": 4096}


class CallFootprint:
    def __init__(self, memory_limit: int, own_users: bool, usage: ProcessUsage, notebooks: NotebookProcesses) -> None:
        self._memory_limit = memory_limit
        self._own_users = own_users
        self._usage = usage
        self._notebooks = notebooks
        self._num_cpus = len(os.sched_getaffinity(0))

    def measure_memory(self, child: CallProcess, pids: list[int]) -> tuple[int, bool]:
        """Return (bytes of the call's processes, whether they exceed the limit). A checkpoint counts too."""
        if len(pids) == 1:  # RLIMIT_AS bounds a single process
            return self._usage.measure_memory(pids, sys.maxsize), False
        limit = self._memory_limit
        if self.find_checkpoint(child) in pids:
            limit = int(limit * MAX_MEMORY_FACTOR)
        used = self._usage.measure_memory(pids, limit)
        return used, used > limit

    def find_checkpoint(self, child: CallProcess) -> int | None:
        """Return the process that the notebook reports as its checkpoint, unless the process computes."""
        pid = self._notebooks.find_checkpoint(child)
        return pid if pid is not None and self._usage.measure_cpu_s([pid]) <= _CHECKPOINT_CPU_S else None

    def has_room_for_checkpoint(self, notebook: CallProcess) -> bool:
        """Return whether the notebook's state fits into the limit twice: a cell may change all of it."""
        if notebook.cgroup is not None:
            return notebook.cgroup.has_room_for_checkpoint()
        pids = self._usage.list_process_tree(notebook.pid)[1:]
        largest = max((self._usage.measure_memory([pid], sys.maxsize) for pid in pids), default=0)
        return 2 * largest <= self._memory_limit * MAX_MEMORY_FACTOR

    def choose_pause_s(self, child: CallProcess, num_processes: int, used: int) -> float:
        """Return the time in which growing processes can exceed the limit by at most `_MAX_OVERSHOOT`."""
        if child.cgroup is not None or num_processes == 1:
            return CHECK_INTERVAL_S
        spare = (1 + _MAX_OVERSHOOT) * self._memory_limit - used
        growth = _GROWTH_BYTES_PER_S * min(self._num_cpus, num_processes)
        return min(CHECK_INTERVAL_S, max(_MIN_CHECK_INTERVAL_S, spare / growth))

    def exceeds_share(self, child: CallProcess, pids: list[int]) -> bool:
        """Return whether the processes hold more locks or shared objects than one call may hold.

        A call with its own user shares no objects; without a cgroup, only this check bounds its epoll watches.
        """
        kinds = _MAX_SHARED_OBJECTS.keys()
        if self._own_users:
            kinds = {"watch"} if child.cgroup is None else set[str]()
        objects = self._usage.count_kernel_objects(pids, by_user=bool(kinds))
        return objects["lock"] > _MAX_LOCKS or any(objects[kind] > _MAX_SHARED_OBJECTS[kind] for kind in kinds)
