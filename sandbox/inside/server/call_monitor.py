"""Enforces the time and memory limits of calls that do not end immediately.

    5 ms after its start          the fork server reads its pipes, so that it can write more than they hold
    8, 15 or 25 ms of CPU time    it is a long call: lower priority, and time slices
                                  (sandbox.inside.server.time_slices). CPU time of its children counts
    every 50 ms (or less)         the memory of all its processes is measured against the limit
    the time limit                it is killed

A call's clock starts with its code. The clock stops while the call waits for a CPU, up to
`_MAX_EXTENSION_FACTOR` time limits, and while the call waits for its first time slice: a busy
machine must not count as the model's mistake.
"""

import heapq
import os
import signal
import sys
import time
from typing import Protocol

from sandbox.inside.server.call_cgroups import CallCgroup
from sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from sandbox.inside.server.proc_usage import ProcessUsage
from sandbox.inside.server.time_slices import TimeSlices
from sandbox.inside.wire.server_settings import ServerSettings

MAX_OUTCOME_BYTES = 1 << 20

_FIRST_CHECK_S = 0.005  # most calls end earlier: their pipes are read once, at their end
_LONG_CPU_S = {"bare": 0.008, "numpy": 0.015, "scientific": 0.025}  # nearly all calls need less
_LONG_IDLE_S = 0.05  # clock time after which a sleeping worker makes its call a long one
_CHECK_INTERVAL_S = 0.05
_BUSY_SHARE = 0.02  # CPU time per time between two checks
_NICE = 10  # a tenth of a CPU next to a busy process; an unprivileged process cannot lower it again
_MAX_EXTENSION_FACTOR = 4
_ROLLBACK_TIMEOUT_S = 0.5  # for a notebook's checkpoint to report the worker's death


class CallController(Protocol):
    """The fork server's actions on a call's process (see ForkServer)."""

    def poll_pipes(self, child: CallProcess) -> None: ...
    def receive_reply(self, child: CallProcess) -> bool: ...
    def stop(self, child: CallProcess) -> None: ...


class CallMonitor:
    def __init__(
        self, settings: ServerSettings, usage: ProcessUsage, notebooks: NotebookProcesses, controller: CallController
    ) -> None:
        self._limit_s = settings.time_limit_s
        self._memory_limit = settings.memory_mib << 20
        self._long_cpu_s = _LONG_CPU_S[settings.preload]
        self._usage = usage
        self._notebooks = notebooks
        self._controller = controller
        self._slices: TimeSlices[CallProcess] = TimeSlices(
            max(1, len(os.sched_getaffinity(0)) // settings.fork_servers)
        )
        self._timers: list[tuple[float, int, int, CallProcess]] = []  # (when, order, call's serial, child)
        self._num_timers = 0

    def get_wait_s(self) -> float:
        """Seconds until `run` has something to do; negative for never."""
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def on_call_started(self, child: CallProcess, now: float) -> None:
        self._set_timer(child, now + _FIRST_CHECK_S)

    def on_call_ended(self, child: CallProcess) -> None:
        if child.stopped_at is not None:
            self._apply_slices([], [child], time.monotonic())
        if child in self._slices:
            self._apply_slices(*self._slices.remove(child), time.monotonic())

    def run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, serial, child = heapq.heappop(self._timers)
            if child.call is None or child.call_serial != serial:
                continue
            if child.notebook_id is not None and not self._controller.receive_reply(child):
                continue
            if child.exceeded_limit is not None:
                self._stop_call(child, child.exceeded_limit, now)
            elif now >= child.deadline and not self._extend_deadline(child, now):
                self._stop_call(child, "timeout", now)
            elif child.stopped_at is None:
                self._check_call(child, now)
            else:
                self._set_timer(child, child.deadline)

    def _stop_call(self, child: CallProcess, reason: str, now: float) -> None:
        child.exceeded_limit = reason
        self._controller.stop(child)
        self._set_timer(child, now + _ROLLBACK_TIMEOUT_S)

    def _set_timer(self, child: CallProcess, when: float) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, child.call_serial, child))

    # ------------------------------------------------------------ one call

    def _check_call(self, child: CallProcess, now: float) -> None:
        if not child.pipes_polled:
            child.pipes_polled = True
            self._controller.poll_pipes(child)
        if child.sampled_at is None and not self._is_long(child, now):
            pause_s = min(max(now - child.started_at, _FIRST_CHECK_S), _CHECK_INTERVAL_S)
            self._set_timer(child, min(child.deadline, now + pause_s))
        elif self._check_process_tree(child, now):
            self._set_timer(child, min(child.deadline, now + _CHECK_INTERVAL_S))
        else:
            self._stop_call(child, "memory", now)

    def _is_long(self, child: CallProcess, now: float) -> bool:
        worker = self._find_worker(child)
        if worker is None:
            return False
        cpu_s, waited_s = self._usage.read_schedule(worker)
        if cpu_s - child.cpu_s >= self._long_cpu_s or self._usage.has_children(worker):
            return True
        clock_s = now - child.started_at - (waited_s - child.waited_s)
        return clock_s >= _LONG_IDLE_S and self._usage.read_state(worker) == b"S"

    def _find_worker(self, child: CallProcess) -> int | None:
        if child.worker is None:
            child.worker = self._notebooks.find_worker(child)
            if child.worker is not None and child.notebook_id is not None:  # earlier cells
                child.cpu_s, child.waited_s = self._usage.read_schedule(child.worker)
        return child.worker

    def _check_process_tree(self, child: CallProcess, now: float) -> bool:
        """Updates CPU time and memory of the call's processes. False above the memory limit."""
        if child.cgroup is not None and self._exceeds_cgroup_limit(child, child.cgroup):
            return False
        pids, used = self._measure_tree_memory(child)
        if len(pids) > 1 and used > self._memory_limit:  # RLIMIT_AS bounds a single process
            pids, used = self._measure_tree_memory(child)  # pages of an exiting process may count twice
            if len(pids) > 1 and used > self._memory_limit:
                return False
        child.memory_bytes = used
        total_s = self._usage.measure_cpu_s(pids)
        if child.sampled_at is None:
            child.sampled_at, child.tree_cpu_s = now, 0.0 if child.notebook_id is None else total_s
        used_s = max(0.0, total_s - child.tree_cpu_s)
        if child not in self._slices and used_s < self._long_cpu_s:
            return True
        busy = used_s > _BUSY_SHARE * (now - child.sampled_at) or any(
            self._usage.read_state(pid) == b"R" for pid in pids
        )
        child.sampled_at, child.tree_cpu_s = now, total_s
        _lower_priority(child)
        self._apply_slices(*self._slices.update(child, used_s, used, busy), now)
        return True

    def _exceeds_cgroup_limit(self, child: CallProcess, cgroup: CallCgroup) -> bool:
        if cgroup.exceeds_limit():
            checkpoint = self._notebooks.find_checkpoint(child)
            if checkpoint is None or cgroup.exceeds_limit(self._usage.measure_memory([checkpoint], sys.maxsize)):
                return True
        return cgroup.take_oom_kill() == "call"

    def _measure_tree_memory(self, child: CallProcess) -> tuple[list[int], int]:
        """(pids, bytes in memory) of the call's processes, without the notebook's checkpoint."""
        checkpoint = self._notebooks.find_checkpoint(child)
        pids = [pid for pid in self._usage.list_process_tree(child.pid) if pid != checkpoint]
        return pids, self._usage.measure_memory(pids, self._memory_limit)

    def _extend_deadline(self, child: CallProcess, now: float) -> bool:
        stopped_s = child.stopped_s + (now - child.stopped_at if child.stopped_at is not None else 0.0)
        last = child.started_at + self._limit_s * _MAX_EXTENSION_FACTOR
        if not self._slices.had_slice(child):
            last += stopped_s
        if now >= last:
            return False
        child.read_outcome(MAX_OUTCOME_BYTES)
        worker = self._find_worker(child)
        if child.outcome is None and worker is not None and child.update_start(now):
            waited_s = self._usage.read_schedule(worker)[1] - child.waited_s
            child.deadline = min(last, child.started_at + self._limit_s + waited_s + stopped_s)
        else:  # the code has not begun or has ended: isolation and exit are slow on a busy machine
            child.deadline = min(last, now + self._limit_s)
        return child.deadline > now + 0.001

    # ------------------------------------------------------------ time slices

    def _apply_slices(self, to_stop: list[CallProcess], to_resume: list[CallProcess], now: float) -> None:
        for child in to_stop:
            child.stopped_at = now
            _signal_group(child, signal.SIGSTOP)
        for child in to_resume:
            assert child.stopped_at is not None
            child.stopped_s += now - child.stopped_at
            child.stopped_at = None
            _signal_group(child, signal.SIGCONT)
            self._set_timer(child, now + _CHECK_INTERVAL_S)


def _signal_group(child: CallProcess, number: int) -> None:
    """Signals the worker's process group."""
    try:
        os.killpg(child.worker or child.pid, number)
    except ProcessLookupError:
        return  # already ended


def _lower_priority(child: CallProcess) -> None:
    try:
        os.setpriority(os.PRIO_PGRP, child.worker or child.pid, _NICE)
    except OSError:
        return  # already ended, or the code chose a lower priority
