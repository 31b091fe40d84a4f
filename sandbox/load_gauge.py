"""Measures the load of a sandbox: running and queued calls, and their integrals over time."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec


class SandboxLoad(msgspec.Struct, frozen=True):
    """The current load, and counters since the sandbox was made."""

    running: int  # calls that hold a slot of a fork server
    queued: int  # calls that wait for a slot, or for an earlier cell of their notebook
    gradings: int  # gradings in flight, queued or running
    done: int  # calls that have ended, including failed and cancelled ones
    graded: int  # gradings that have ended
    busy_s: float  # time with at least one running call
    running_s: float  # running time, summed over calls
    queued_s: float  # queueing time, summed over calls
    code_s: float  # time from the start of the code to its end, summed over calls


class LoadGauge:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._updated_at = clock()
        self._running = self._queued = self._gradings = self._done = self._graded = 0
        self._busy_s = self._running_s = self._queued_s = self._code_s = 0.0

    @contextmanager
    def track_call(self) -> Generator[None]:
        """Count a call from its arrival to its end."""
        self._update(queued=1)
        try:
            yield
        finally:
            self._update(queued=-1)
            self._done += 1

    @contextmanager
    def track_slot(self) -> Generator[None]:
        """Count a call as running while it holds a slot; a rebuild of a notebook holds a slot for each cell."""
        self._update(running=1, queued=-1)
        try:
            yield
        finally:
            self._update(running=-1, queued=1)

    @contextmanager
    def track_grading(self) -> Generator[None]:
        self._gradings += 1
        try:
            yield
        finally:
            self._gradings -= 1
            self._graded += 1

    def add_code_time(self, seconds: float) -> None:
        self._code_s += seconds

    def get_load(self) -> SandboxLoad:
        self._update()
        return SandboxLoad(
            running=self._running,
            queued=self._queued,
            gradings=self._gradings,
            done=self._done,
            graded=self._graded,
            busy_s=self._busy_s,
            running_s=self._running_s,
            queued_s=self._queued_s,
            code_s=self._code_s,
        )

    def _update(self, running: int = 0, queued: int = 0) -> None:
        now = self._clock()
        elapsed_s, self._updated_at = now - self._updated_at, now
        self._busy_s += elapsed_s if self._running else 0.0
        self._running_s += elapsed_s * self._running
        self._queued_s += elapsed_s * self._queued
        self._running += running
        self._queued += queued
