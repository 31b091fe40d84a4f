"""Time and memory of the calls that do not end at once: which of them run, and when they are over. Standard library only.

    5 ms after its start           its pipes are read from now on, so that it can write more than they hold
    8 or 25 ms of processor time   it is a long call: lower priority, and it takes turns (sandbox.inside.turns);
                                   so is one that has started processes, as soon as they take as much
    every 50 ms from then on       what all its processes hold together; beyond the limit it is over. Until then it is
                                   looked at as often, or more often
    the time limit                 it is over

A call's clock starts with its code. It stands still while the call waits for a processor, up to `_PATIENCE` time
limits, and while it waits for its first turn: a busy machine must not turn into the model's mistake.
"""

import heapq
import os
import signal
import time
from typing import Protocol

from sandbox.inside.children import Child
from sandbox.inside.settings import Settings
from sandbox.inside.turns import Turns
from sandbox.inside.usage import Usage

OUTCOME_BYTES = 1 << 20

_FIRST_LOOK_S = 0.005  # most calls end before, and their pipes are read once, at their end
_LONG_CPU_S = {"bare": 0.008, "numpy": 0.015, "scientific": 0.025}  # more than nearly all calls of the flavour need
_LONG_S = 0.05  # of the clock of what does not use the processor itself
_LOOK_EVERY_S = 0.05
_BUSY = 0.02  # of the time between two looks
_NICE = 10  # a tenth of a processor beside one that wants it all; a process cannot be given its priority back
_PATIENCE = 4
_TAKE_OVER_S = 0.5  # for a session's checkpoint to say that the worker has died


class Calls(Protocol):
    """What the fork server does with its calls' processes."""

    def follow(self, child: Child) -> None:
        """Reads its pipes from now on."""
        ...

    def hear(self, child: Child) -> bool:
        """Takes what the process has said. False if nothing more is to come of its call."""
        ...

    def worker(self, child: Child) -> int | None:
        """Who runs the call. None while a session has not said it, or when it has ended."""
        ...

    def checkpoint(self, child: Child) -> int | None:
        """Who keeps a session's state from before the call, and nothing of what the call takes."""
        ...

    def stop(self, child: Child) -> None:
        """Ends the call; the second time, whatever it takes."""
        ...


class Watch:
    def __init__(self, settings: Settings, usage: Usage, calls: Calls) -> None:
        self._limit_s = settings.time_limit_s
        self._memory = settings.memory_mib << 20
        self._long_cpu_s = _LONG_CPU_S[settings.flavour]
        self._usage = usage
        self._calls = calls
        self._turns: Turns[Child] = Turns(max(1, len(os.sched_getaffinity(0)) // settings.fork_servers))
        self._timers: list[tuple[float, int, int, Child]] = []  # (when, order, serial of the call, child)
        self._order = 0

    def until_next(self) -> float:
        """Seconds until `run` has something to do; negative for never."""
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def began(self, child: Child, now: float) -> None:
        self._set_timer(child, now + _FIRST_LOOK_S)

    def ended(self, child: Child) -> None:
        """The call has its answer."""
        if child.stopped_at is not None:
            self._take_turns([], [child], time.monotonic())
        if child in self._turns:
            self._take_turns(*self._turns.leave(child), time.monotonic())

    def run(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, serial, child = heapq.heappop(self._timers)
            if child.call is None or child.serial != serial:
                continue
            if child.session is not None and not self._calls.hear(child):
                continue
            if child.over is not None:
                self._end(child, child.over, now)
            elif now >= child.deadline and not self._still_has_time(child, now):
                self._end(child, "timeout", now)
            elif child.stopped_at is None:
                self._look(child, now)
            else:
                self._set_timer(child, child.deadline)

    def _end(self, child: Child, why: str, now: float) -> None:
        child.over = why
        self._calls.stop(child)
        self._set_timer(child, now + _TAKE_OVER_S)

    def _set_timer(self, child: Child, when: float) -> None:
        self._order += 1
        heapq.heappush(self._timers, (when, self._order, child.serial, child))

    # ------------------------------------------------------------ one call

    def _look(self, child: Child, now: float) -> None:
        if not child.watched:
            child.watched = True
            self._calls.follow(child)
        if child.looked_at is None and not self._is_long(child, now):
            pause_s = min(max(now - child.began_at, _FIRST_LOOK_S), _LOOK_EVERY_S)
            self._set_timer(child, min(child.deadline, now + pause_s))
        elif self._look_at_family(child, now):
            self._set_timer(child, min(child.deadline, now + _LOOK_EVERY_S))
        else:
            self._end(child, "memory", now)

    def _is_long(self, child: Child, now: float) -> bool:
        worker = self._worker(child)
        if worker is None:
            return False
        cpu_s, waited_s = self._usage.schedule(worker)
        if cpu_s - child.cpu_s >= self._long_cpu_s or self._usage.has_started_others(worker):
            return True
        clock_s = now - child.began_at - (waited_s - child.waited_s)
        return clock_s >= _LONG_S and self._usage.state(worker) == b"S"

    def _worker(self, child: Child) -> int | None:
        if child.worker is None:
            child.worker = self._calls.worker(child)
            if child.worker is not None and child.session is not None:  # it has run other cells before
                child.cpu_s, child.waited_s = self._usage.schedule(child.worker)
        return child.worker

    def _look_at_family(self, child: Child, now: float) -> bool:
        """Notes what the call's processes have taken since the last look. False if they hold too much together."""
        pids, held = self._family_memory(child)
        if len(pids) > 1 and held > self._memory:  # one alone is held by its own limit, and is told so
            pids, held = self._family_memory(child)  # while some end, what they shared is counted twice
            if len(pids) > 1 and held > self._memory:
                return False
        total_s = self._usage.cpu_s(pids)
        if child.looked_at is None:
            child.looked_at, child.family_cpu_s = now, 0.0 if child.session is None else total_s
        used_s = max(0.0, total_s - child.family_cpu_s)
        if child not in self._turns and used_s < self._long_cpu_s:
            return True
        busy = used_s > _BUSY * (now - child.looked_at) or any(self._usage.state(pid) == b"R" for pid in pids)
        child.looked_at, child.family_cpu_s = now, total_s
        _lower_priority(child)
        self._take_turns(*self._turns.note(child, used_s, held, busy), now)
        return True

    def _family_memory(self, child: Child) -> tuple[list[int], int]:
        """(its processes, bytes that they hold together), without the one that keeps the state before."""
        checkpoint = self._calls.checkpoint(child)
        pids = [pid for pid in self._usage.family(child.pid) if pid != checkpoint]
        return pids, self._usage.memory(pids, self._memory)

    def _still_has_time(self, child: Child, now: float) -> bool:
        stopped_s = child.stopped_s + (now - child.stopped_at if child.stopped_at is not None else 0.0)
        last = child.began_at + self._limit_s * _PATIENCE
        if not self._turns.had_one(child):
            last += stopped_s
        if now >= last:
            return False
        child.read_outcome(OUTCOME_BYTES)
        worker = self._worker(child)
        if child.outcome is None and worker is not None and child.note_start(now):
            waited_s = self._usage.schedule(worker)[1] - child.waited_s
            child.deadline = min(last, child.began_at + self._limit_s + waited_s + stopped_s)
        else:  # it has not begun yet, or is through: a machine full of calls isolates and ends them slowly
            child.deadline = min(last, now + self._limit_s)
        return child.deadline > now + 0.001

    # ------------------------------------------------------------ turns

    def _take_turns(self, to_stop: list[Child], to_go: list[Child], now: float) -> None:
        for child in to_stop:
            child.stopped_at = now
            _signal_group(child, signal.SIGSTOP)
        for child in to_go:
            assert child.stopped_at is not None
            child.stopped_s += now - child.stopped_at
            child.stopped_at = None
            _signal_group(child, signal.SIGCONT)
            self._set_timer(child, now + _LOOK_EVERY_S)


def _signal_group(child: Child, number: int) -> None:
    """To all that the worker has started and that has not left its process group."""
    try:
        os.killpg(child.worker or child.pid, number)
    except ProcessLookupError:
        return  # it has just ended


def _lower_priority(child: Child) -> None:
    try:
        os.setpriority(os.PRIO_PGRP, child.worker or child.pid, _NICE)
    except OSError:
        return  # it has just ended, or has made itself less urgent still
