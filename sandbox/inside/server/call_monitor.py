"""Enforces the time and memory limits of calls that do not end immediately.

    5 ms after its start          the fork server reads its pipes, so that it can write more than they hold
    8, 15 or 25 ms of CPU time    it is a long call: lower priority, and time slices
                                  (sandbox.inside.server.time_slices). CPU time of its children counts
    every 50 ms (or less)         the memory of all its processes is measured against the limit
    0.1 s after its answer        a program that has not exited is killed; its answer counts
    the time limit                it is killed; if the machine gave it too little CPU time, it has failed
    10 ms after a cell's answer   all processes of the notebook stop until its next cell

A call's clock starts with its code. The clock stops while the call waits for a CPU, up to
`_MAX_EXTENSION_FACTOR` time limits, and while the call waits for its first time slice: a busy
machine must not count as the model's mistake. Waiting for its own threads and children counts.

A measurement of memory takes longer the more processes and mappings a call has. The next one waits
many times as long, so that no call occupies the fork server.
"""

import heapq
import os
import sys
import time
from typing import Protocol

from sandbox.inside.server.call_cgroups import MAX_MEMORY_FACTOR
from sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from sandbox.inside.server.proc_usage import ProcessUsage
from sandbox.inside.server.process_hold import ProcessHold
from sandbox.inside.server.starvation import STARVED, PendingWaits, StopLedger, compute_outside_wait_s, is_starved
from sandbox.inside.server.time_slices import TimeSlices
from sandbox.inside.wire.server_settings import ServerSettings

MAX_OUTCOME_BYTES = 1 << 20

_FIRST_CHECK_S = 0.005  # most calls end earlier: their pipes are read once, at their end
_LONG_CPU_S = {"bare": 0.008, "numpy": 0.015, "scientific": 0.025}  # nearly all calls need less
_LONG_IDLE_S = 0.05  # clock time after which a sleeping worker makes its call a long one
_CHECK_INTERVAL_S, _MIN_CHECK_INTERVAL_S = 0.05, 0.005
_LONG_MEASUREMENT_S = 0.005
_PAUSE_PER_MEASUREMENT, _PAUSE_PER_LONG_MEASUREMENT = 8, 20
_GROWTH_BYTES_PER_S = 1 << 30  # of one CPU's processes, at most
_MAX_OVERSHOOT = 0.25  # of the memory limit, between two measurements
_ANSWER_GRACE_S = 0.1  # for a program to exit
_HOLD_AFTER_S = 0.01  # a notebook does not stop if its next cell arrives earlier
_SPARE_CPU_S = 0.002  # for the end of its checkpoint
_MAX_ESCAPES = 6  # looks that find a running process in an idle notebook
_BUSY_SHARE = 0.02  # CPU time per time between two checks
_MAX_LOCKS = 1024  # byte-range locks of all processes of a call
_NICE = 10  # a tenth of a CPU next to a busy process; an unprivileged process cannot lower it again
_MAX_EXTENSION_FACTOR = 4
_ROLLBACK_TIMEOUT_S = 0.5  # for a notebook's checkpoint to report the worker's death


class CallController(Protocol):
    """The fork server's actions on a call's process (see ForkServer)."""

    def poll_pipes(self, child: CallProcess) -> None: ...
    def receive_reply(self, child: CallProcess) -> bool: ...
    def stop(self, child: CallProcess) -> None: ...
    def kill(self, child: CallProcess) -> None: ...


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
        self._num_cpus = len(os.sched_getaffinity(0))
        num_running = max(1, self._num_cpus // settings.fork_servers)
        self._slices: TimeSlices[CallProcess] = TimeSlices(num_running)
        self._stops: StopLedger[CallProcess] = StopLedger(num_running)
        self._pending: PendingWaits[CallProcess] = PendingWaits()
        self._holds: dict[CallProcess, ProcessHold] = {}
        self._timers: list[tuple[float, int, CallProcess]] = []  # (when, number, child)
        self._num_timers = 0

    def get_wait_s(self) -> float:
        """Seconds until `run` has something to do; negative for never."""
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def on_call_started(self, child: CallProcess, now: float) -> None:
        self._set_timer(child, now + _FIRST_CHECK_S)

    def on_program_answered(self, child: CallProcess) -> None:
        """The program only needs to exit."""
        child.deadline = time.monotonic() + _ANSWER_GRACE_S
        self._set_timer(child, child.deadline)

    def on_call_ended(self, child: CallProcess, now: float) -> None:
        if child.stopped_at is not None:
            self._apply_slices([], [child], now)
        self._stops.forget(child)
        self._pending.forget(child)
        if child in self._slices:
            self._apply_slices(*self._slices.remove(child), now)
        if child.notebook_id is not None:
            self._set_timer(child, now + _HOLD_AFTER_S)

    def release(self, child: CallProcess) -> None:
        """Lets the processes of a call or notebook run again."""
        hold = self._holds.pop(child, None)
        if hold is not None:
            hold.release()

    def forget(self, child: CallProcess) -> None:
        """The process has ended."""
        self._holds.pop(child, None)

    def run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            when, _, child = heapq.heappop(self._timers)
            if when != child.timer_at or (child.call is None and child.notebook_id is None):
                continue
            child.timer_at = None
            if child.check_at > now:
                self._set_timer(child, child.check_at)
                continue
            if child.call is None:
                self._hold_notebook(child, now)
                continue
            if child.notebook_id is not None and not self._controller.receive_reply(child):
                continue
            if child.exceeded_limit is not None:
                self._stop_call(child, child.exceeded_limit, now)
            elif now >= child.deadline and (reason := self._find_timeout(child, now)) is not None:
                self._stop_call(child, reason, now)
            elif child.stopped_at is None:
                self._check_call(child, now)
            else:
                self._set_timer(child, min(child.deadline, now + self._holds[child].check()))

    def _stop_call(self, child: CallProcess, reason: str, now: float) -> None:
        child.exceeded_limit = reason
        if reason == STARVED:
            self._controller.kill(child)  # it runs again: a notebook is built again, with its files
        else:
            self._controller.stop(child)
        self._set_timer(child, now + _ROLLBACK_TIMEOUT_S)

    def _set_timer(self, child: CallProcess, when: float) -> None:
        """Replaces the process's timer. A timer that is due earlier stays and is extended then."""
        child.check_at = when
        if child.timer_at is None or when < child.timer_at:
            self._num_timers += 1
            child.timer_at = when
            heapq.heappush(self._timers, (when, self._num_timers, child))

    # ------------------------------------------------------------ one call

    def _check_call(self, child: CallProcess, now: float) -> None:
        if not child.pipes_polled:
            child.pipes_polled = True
            self._controller.poll_pipes(child)
        if child.sampled_at is None and not self._is_long(child, now):
            pause_s = min(max(now - child.started_at, _FIRST_CHECK_S), _CHECK_INTERVAL_S)
            self._set_timer(child, min(child.deadline, now + pause_s))
            return
        began_s = time.thread_time()
        pause_s = self._check_process_tree(child, now)
        if pause_s is None:
            self._stop_call(child, "memory", now)
        elif child.stopped_at is None:
            self._set_timer(child, min(child.deadline, now + max(pause_s, _compute_pause_s(began_s))))

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

    def _check_process_tree(self, child: CallProcess, now: float) -> float | None:
        """Updates CPU time and memory of the call's processes.

        Seconds until the next check; None above the memory limit.
        """
        if child.cgroup is not None and child.cgroup.find_culprit() == "call":
            return None
        pids = self._usage.list_process_tree(child.pid)
        used, is_too_large = self._measure_memory(child, pids)
        if is_too_large:
            pids = self._usage.list_process_tree(child.pid)
            used, is_too_large = self._measure_memory(child, pids)  # pages of an exiting process may count twice
            if is_too_large:
                return None
        checkpoint = self._notebooks.find_checkpoint(child)
        pids = [pid for pid in pids if pid != checkpoint]
        if self._usage.count_locks(pids) > _MAX_LOCKS:
            return None
        child.memory_bytes = used
        pause_s = _CHECK_INTERVAL_S if child.cgroup is not None else self._choose_pause_s(len(pids), used)
        total_s = self._usage.measure_cpu_s(pids)
        if child.sampled_at is None:
            child.sampled_at, child.tree_cpu_s = now, 0.0 if child.notebook_id is None else total_s
        used_s = max(0.0, total_s - child.tree_cpu_s)
        if child not in self._slices and used_s < self._long_cpu_s:
            return pause_s
        busy = used_s > _BUSY_SHARE * (now - child.sampled_at) or any(
            self._usage.read_state(pid) == b"R" for pid in pids
        )
        child.sampled_at, child.tree_cpu_s = now, total_s
        child.spent_cpu_s += used_s
        self._stops.add_cpu(used_s)
        _lower_priority(pids if child.notebook_id is None else pids[1:])
        self._apply_slices(*self._slices.update(child, used_s, used, busy), now)
        return pause_s

    def _choose_pause_s(self, num_processes: int, used: int) -> float:
        """Until several growing processes could exceed the limit by `_MAX_OVERSHOOT`."""
        if num_processes == 1:
            return _CHECK_INTERVAL_S
        spare = (1 + _MAX_OVERSHOOT) * self._memory_limit - used
        growth = _GROWTH_BYTES_PER_S * min(self._num_cpus, num_processes)
        return min(_CHECK_INTERVAL_S, max(_MIN_CHECK_INTERVAL_S, spare / growth))

    def _measure_memory(self, child: CallProcess, pids: list[int]) -> tuple[int, bool]:
        """(bytes, whether they exceed the limit) of the call's processes, which may include a checkpoint."""
        if len(pids) == 1:  # RLIMIT_AS bounds a single process
            return self._usage.measure_memory(pids, sys.maxsize), False
        limit = self._memory_limit
        if self._notebooks.find_checkpoint(child) in pids:
            limit = int(limit * MAX_MEMORY_FACTOR)
        used = self._usage.measure_memory(pids, limit)
        return used, used > limit

    def has_room_for_checkpoint(self, notebook: CallProcess) -> bool:
        """Whether the notebook's state fits into the limit twice: a cell may change all of it."""
        if notebook.cgroup is not None:
            return notebook.cgroup.has_room_for_checkpoint()
        worker = self._notebooks.find_worker(notebook)
        limit = self._memory_limit * MAX_MEMORY_FACTOR
        return worker is None or 2 * self._usage.measure_memory([worker], sys.maxsize) <= limit

    def _find_timeout(self, child: CallProcess, now: float) -> str | None:
        """The reason to end a call at its deadline. None if its deadline has been extended."""
        child.read_outcome(MAX_OUTCOME_BYTES)
        if child.outcome is not None or child.has_invalid_reply:
            return "timeout"
        present_stop_s = now - child.stopped_at if child.stopped_at is not None else 0.0
        stopped_s, had_slice = child.stopped_s + present_stop_s, self._slices.had_slice(child)
        worker = self._find_worker(child)
        has_begun = worker is not None and child.update_start(now)
        last = child.started_at + self._limit_s * _MAX_EXTENSION_FACTOR + (0.0 if had_slice else stopped_s)
        if worker is None or not has_begun:  # isolation is slow on a busy machine
            if now >= last:
                return STARVED if child.start_report is None else "timeout"
            child.deadline = min(last, now + self._limit_s)
            return None
        before = child.cpu_s, child.waited_s
        threads = self._usage.list_thread_times(child.pid, worker, before, child.started_at)
        total_cpu_s = max(child.spent_cpu_s, sum(each.cpu_s for each in threads))
        waited_s = compute_outside_wait_s(threads, total_cpu_s)
        if now < last:
            child.deadline = min(last, child.started_at + self._limit_s + waited_s + stopped_s)
            if child.deadline > now + 0.001:
                self._pending.forget(child)
                return None
        outside_s = self._stops.measure_outside_s(child, present_stop_s) if had_slice else stopped_s
        if now >= last and is_starved(now - child.started_at, waited_s, outside_s, self._limit_s):
            return STARVED
        since = self._pending.find_since(child, now, threads) if total_cpu_s < self._limit_s else None
        if since is None:
            return "timeout"
        child.deadline = now + _CHECK_INTERVAL_S
        return STARVED if now >= since + self._limit_s else None

    # ------------------------------------------------------------ idle notebooks and time slices

    def _hold_notebook(self, child: CallProcess, now: float) -> None:
        """Keeps an idle notebook stopped. Ends a notebook that continues or is too large."""
        if child.notebook_id is None or self._notebooks.get(child.notebook_id) is not child:
            return
        began_s = time.thread_time()
        hold = self._holds.setdefault(child, ProcessHold(child, self._usage, _SPARE_CPU_S))
        was_verified = hold.is_verified
        pause_s = hold.check()
        if hold.num_escapes > _MAX_ESCAPES or (not was_verified and self._measure_memory(child, hold.pids)[1]):
            self._controller.kill(child)
        else:
            self._set_timer(child, now + max(pause_s, _compute_pause_s(began_s)))

    def _apply_slices(self, to_stop: list[CallProcess], to_resume: list[CallProcess], now: float) -> None:
        for child in to_stop:
            child.stopped_at = now
            self._stops.begin_stop(child)
            if child.exceeded_limit is None:  # else its rollback must not stop
                hold = self._holds[child] = ProcessHold(child, self._usage)
                self._set_timer(child, now + hold.check())
        for child in to_resume:
            assert child.stopped_at is not None
            child.stopped_s += now - child.stopped_at
            self._stops.end_stop(child, now - child.stopped_at)
            child.stopped_at = None
            self.release(child)
            if child.exceeded_limit is None:
                self._set_timer(child, now + _CHECK_INTERVAL_S)


def _compute_pause_s(began_s: float) -> float:
    """Until the next measurement of a call, so that none occupies the fork server."""
    took_s = time.thread_time() - began_s
    return took_s * (_PAUSE_PER_MEASUREMENT if took_s < _LONG_MEASUREMENT_S else _PAUSE_PER_LONG_MEASUREMENT)


def _lower_priority(pids: list[int]) -> None:
    """Also of processes that left their process group. A group of another call stays as it is."""
    for pid in pids:
        try:
            if os.getpgid(pid) == pid:
                os.setpriority(os.PRIO_PGRP, pid, _NICE)
            elif os.getpriority(os.PRIO_PROCESS, pid) < _NICE:
                os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        except OSError:
            continue  # already ended, or the code chose a lower priority
