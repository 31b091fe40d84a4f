"""Enforces the time and memory limits of calls that do not end immediately.

    5 ms after a call's start     the fork server reads the call's pipes, so that the call can fill them again
    8, 15 or 25 ms of CPU time    the call becomes a long one: lower priority, and time slices
                                  (asterism.sandbox.inside.server.time_slices). CPU time of its children counts
    every 50 ms (or less)         the memory of all its processes is measured against the limit
    0.1 s after its answer        a program that has not exited is killed; its answer counts
    at the time limit             the call is killed; after too little CPU time, it counts as a failure of the machine
    10 ms after a cell's answer   all processes of the notebook stop until its next cell

A call's clock starts with its code. The clock stops while the call waits for a CPU, up to
`max_call_extension` time limits, and while the call waits for its first time slice: a busy
machine must not count as the model's mistake. Waits for its own threads and children count.

A measurement takes longer for a call with more processes and mappings. The pause until the next
one is many times as long, so that no call occupies the fork server.
"""

import heapq
import os
import time
from collections.abc import Mapping
from typing import Protocol

from asterism.sandbox.inside.server.call_ending import CallKiller
from asterism.sandbox.inside.server.call_footprint import CHECK_INTERVAL_S, CallFootprint
from asterism.sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from asterism.sandbox.inside.server.proc_usage import ProcessUsage
from asterism.sandbox.inside.server.process_hold import ProcessHold
from asterism.sandbox.inside.server.starvation import (
    STARVED,
    PendingWaits,
    StopLedger,
    compute_outside_wait_s,
    is_starved,
)
from asterism.sandbox.inside.server.time_slices import TimeSlices
from asterism.sandbox.inside.wire.server_settings import ServerSettings

MAX_OUTCOME_BYTES = 1 << 20

_FIRST_CHECK_S = 0.005  # most calls end earlier: their pipes are read once, at their end
_LONG_CPU_S = {"bare": 0.008, "numpy": 0.015, "scientific": 0.025}  # CPU time of a long call; most need less
_LONG_IDLE_S = 0.05  # clock time after which a sleeping worker makes its call a long one
_LONG_MEASUREMENT_S = 0.005
_PAUSE_PER_MEASUREMENT, _PAUSE_PER_LONG_MEASUREMENT = 8, 20
_ANSWER_GRACE_S = 0.1  # time for a program to exit after its answer
_HOLD_AFTER_S = 0.01  # a notebook does not stop if its next cell arrives earlier
_SPARE_CPU_S = 0.002  # CPU time for a worker to end its checkpoint
_MAX_ESCAPES = 6  # checks that find a running process in a stopped notebook, before the notebook is killed
_BUSY_SHARE = 0.02  # CPU time per clock time between two checks, above which a call is busy
_NOTEBOOK_PROCESSES = 3  # the base, the worker and a checkpoint (asterism.sandbox.inside.call.notebook_process)
_NICE = 10  # nice value: a tenth of a CPU next to a busy process; only privileged processes can lower the value again
_ROLLBACK_TIMEOUT_S = 0.5  # time for a notebook's checkpoint to report the exit of its worker


class CallController(Protocol):
    """The fork server's actions on a call's process (see ForkServer)."""

    def poll_pipes(self, child: CallProcess) -> None: ...
    def receive_reply(self, child: CallProcess) -> bool: ...


class CallMonitor:
    def __init__(
        self,
        settings: ServerSettings,
        usage: ProcessUsage,
        notebooks: NotebookProcesses,
        footprint: CallFootprint,
        killer: CallKiller,
        controller: CallController,
    ) -> None:
        self._limit_s = settings.time_limit_s
        self._max_clock_s = settings.time_limit_s * settings.max_call_extension
        self._long_cpu_s = _LONG_CPU_S[settings.preload]
        self._usage = usage
        self._notebooks = notebooks
        self._footprint = footprint
        self._killer = killer
        self._controller = controller
        num_running = max(1, len(os.sched_getaffinity(0)) // settings.fork_servers)
        self._slices: TimeSlices[CallProcess] = TimeSlices(num_running)
        self._stops: StopLedger[CallProcess] = StopLedger(num_running)
        self._pending: PendingWaits[CallProcess] = PendingWaits()
        self._holds: dict[CallProcess, ProcessHold] = {}
        self._timers: list[tuple[float, int, CallProcess]] = []  # (when, number, child)
        self._num_timers = 0

    def get_wait_s(self) -> float:
        """Return the seconds until `run_timers` has work, or a negative number for never."""
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def on_call_started(self, child: CallProcess, now: float) -> None:
        self._set_timer(child, now + _FIRST_CHECK_S)

    def on_program_answered(self, child: CallProcess) -> None:
        """Set the deadline of a program that only needs to exit."""
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
        """Let the processes of a call or notebook run again."""
        hold = self._holds.pop(child, None)
        if hold is not None:
            hold.release()

    def forget(self, child: CallProcess) -> None:
        self._holds.pop(child, None)

    def run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            when, _, child = heapq.heappop(self._timers)
            if when != child.timer_at or (child.call is None and child.notebook_id is None):
                continue
            child.timer_at = None
            try:
                self._run_timer(child, now)
            except OSError as error:
                self._killer.fail(child, error)

    def _run_timer(self, child: CallProcess, now: float) -> None:
        if child.check_at > now:
            self._set_timer(child, child.check_at)
        elif child.call is None:
            self._hold_notebook(child, now)
        elif child.notebook_id is not None and not self._controller.receive_reply(child):
            return
        elif child.exceeded_limit is not None:
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
            self._killer.kill(child)  # a starved call runs again: its notebook is rebuilt, with its files
        else:
            self._killer.stop(child)
        self._set_timer(child, now + _ROLLBACK_TIMEOUT_S)

    def _set_timer(self, child: CallProcess, when: float) -> None:
        """Replace the process's timer. An earlier timer stays, and is extended when it is due."""
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
            pause_s = min(max(now - child.started_at, _FIRST_CHECK_S), CHECK_INTERVAL_S)
            self._set_timer(child, min(child.deadline, now + pause_s))
            return
        began_s = time.thread_time()
        pause_s = self._check_process_tree(child, now)
        if pause_s is None:
            self._stop_call(child, "memory", now)
        elif child.stopped_at is None:
            self._set_timer(child, min(child.deadline, now + max(pause_s, _compute_pause_s(began_s))))

    def _is_long(self, child: CallProcess, now: float) -> bool:
        if child.notebook_id is not None:
            return self._is_long_cell(child, now)
        cpu_s, waited_s = self._usage.read_schedule(child.pid)
        if cpu_s >= self._long_cpu_s or self._usage.has_children(child.pid):
            return True
        clock_s = now - child.started_at - waited_s
        return clock_s >= _LONG_IDLE_S and self._usage.read_state(child.pid) == b"S"

    def _is_long_cell(self, child: CallProcess, now: float) -> bool:
        """Judge all processes of the notebook: only the notebook itself could report which one runs the cell."""
        pids = self._usage.list_process_tree(child.pid)
        cpu_s = self._usage.measure_cpu_s(pids)
        if child.schedules is None:  # CPU times of earlier cells
            child.schedules = {pid: self._usage.read_schedule(pid) for pid in pids[1:]}
            child.tree_cpu_s = cpu_s
        if cpu_s - child.tree_cpu_s >= self._long_cpu_s or len(pids) > _NOTEBOOK_PROCESSES:
            return True
        return now - child.started_at >= _LONG_IDLE_S and not self._is_any_running(pids)

    def _is_any_running(self, pids: list[int]) -> bool:
        return any(self._usage.read_state(pid) == b"R" for pid in pids)

    def _check_process_tree(self, child: CallProcess, now: float) -> float | None:
        """Update CPU time and memory of the call's processes.

        Return the seconds until the next check, or None above the memory limit.
        """
        if child.cgroup is not None and child.cgroup.find_culprit() == "call":
            return None
        pids = self._usage.list_process_tree(child.pid)
        used, is_too_large = self._footprint.measure_memory(child, pids)
        if is_too_large:
            pids = self._usage.list_process_tree(child.pid)
            # Pages of an exiting process may count twice.
            used, is_too_large = self._footprint.measure_memory(child, pids)
            if is_too_large:
                return None
        if self._footprint.exceeds_share(child, pids):
            return None
        child.memory_bytes = used
        pause_s = self._footprint.choose_pause_s(child, len(pids), used)
        total_s = self._usage.measure_cpu_s(pids)
        if child.sampled_at is None:
            child.sampled_at = now
        used_s = max(0.0, total_s - child.tree_cpu_s)
        if child not in self._slices and used_s < self._long_cpu_s:
            return pause_s
        busy = used_s > _BUSY_SHARE * (now - child.sampled_at) or self._is_any_running(pids)
        child.sampled_at, child.tree_cpu_s = now, total_s
        child.spent_cpu_s += used_s
        self._stops.add_cpu(used_s)
        checkpoint = self._footprint.find_checkpoint(child)
        _lower_priority(pids if child.notebook_id is None else [pid for pid in pids[1:] if pid != checkpoint])
        self._apply_slices(*self._slices.update(child, used_s, used, busy), now)
        return pause_s

    def _find_timeout(self, child: CallProcess, now: float) -> str | None:
        """Return the reason to end a call at its deadline, or None if the deadline has been extended."""
        child.read_outcome(MAX_OUTCOME_BYTES)
        if child.outcome is not None or child.has_invalid_reply:
            return "timeout"
        present_stop_s = now - child.stopped_at if child.stopped_at is not None else 0.0
        stopped_s, had_slice = child.stopped_s + present_stop_s, self._slices.had_slice(child)
        has_begun = child.update_start(now)
        last = child.started_at + self._max_clock_s + (0.0 if had_slice else stopped_s)
        if not has_begun:  # the isolation is slow on a busy machine
            if now >= last:
                return STARVED if child.start_report is None else "timeout"
            child.deadline = min(last, now + self._limit_s)
            return None
        threads = self._usage.list_thread_times(child.pid, self._get_earlier_times(child), child.started_at)
        total_cpu_s = max(child.spent_cpu_s, sum(each.cpu_s for each in threads))
        waited_s = compute_outside_wait_s(threads, total_cpu_s)
        if now < last:
            child.deadline = min(last, child.started_at + self._limit_s + waited_s + stopped_s)
            if child.deadline > now + 0.001:
                self._pending.forget(child)
                return None
        if total_cpu_s >= self._limit_s:
            return "timeout"
        outside_s = self._stops.measure_outside_s(child, present_stop_s) if had_slice else stopped_s
        if now >= last and is_starved(now - child.started_at, waited_s, outside_s, self._limit_s):
            return STARVED
        since = self._pending.find_since(child, now, threads)
        if since is None:
            return "timeout"
        child.deadline = now + CHECK_INTERVAL_S
        return STARVED if now >= since + self._limit_s else None

    def _get_earlier_times(self, child: CallProcess) -> Mapping[int, tuple[float, float]]:
        """Return by pid, for the processes that can run the call, CPU times and waits before the call."""
        return {child.pid: (0.0, 0.0)} if child.notebook_id is None else child.schedules or {}

    # ------------------------------------------------------------ idle notebooks and time slices

    def _hold_notebook(self, child: CallProcess, now: float) -> None:
        """Keep an idle notebook stopped; kill a notebook that continues or is too large."""
        if child.notebook_id is None or self._notebooks.get(child.notebook_id) is not child:
            return
        began_s = time.thread_time()
        hold = self._holds.setdefault(child, ProcessHold(child, self._usage, _SPARE_CPU_S))
        was_verified = hold.is_verified
        pause_s = hold.check()
        if hold.num_escapes > _MAX_ESCAPES or (not was_verified and self._exceeds_limit(child, hold.pids)):
            self._killer.kill(child)
        else:
            self._set_timer(child, now + max(pause_s, _compute_pause_s(began_s)))

    def _exceeds_limit(self, child: CallProcess, pids: list[int]) -> bool:
        return self._footprint.measure_memory(child, pids)[1] or self._footprint.exceeds_share(child, pids)

    def _apply_slices(self, to_stop: list[CallProcess], to_resume: list[CallProcess], now: float) -> None:
        for child in to_stop:
            child.stopped_at = now
            self._stops.begin_stop(child)
            if child.exceeded_limit is None:  # the rollback of a call beyond its limit must not stop
                hold = self._holds[child] = ProcessHold(child, self._usage)
                self._set_timer(child, now + hold.check())
        for child in to_resume:
            assert child.stopped_at is not None
            child.stopped_s += now - child.stopped_at
            self._stops.end_stop(child, now - child.stopped_at)
            child.stopped_at = None
            self.release(child)
            if child.exceeded_limit is None:
                self._set_timer(child, now + CHECK_INTERVAL_S)


def _compute_pause_s(began_s: float) -> float:
    """Return the time until the next measurement of a call, so that no call occupies the fork server."""
    took_s = time.thread_time() - began_s
    return took_s * (_PAUSE_PER_MEASUREMENT if took_s < _LONG_MEASUREMENT_S else _PAUSE_PER_LONG_MEASUREMENT)


def _lower_priority(pids: list[int]) -> None:
    """Lower the priority, also of processes that left their process group. Other groups keep their priority."""
    for pid in pids:
        try:
            if os.getpgid(pid) == pid:
                os.setpriority(os.PRIO_PGRP, pid, _NICE)
            elif os.getpriority(os.PRIO_PROCESS, pid) < _NICE:
                os.setpriority(os.PRIO_PROCESS, pid, _NICE)
        except OSError:
            continue  # the process has ended, or the code chose a lower priority
