"""How busy a sandbox is: calls that run and that wait, counted and integrated over time as they come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec


class SandboxLoad(msgspec.Struct, frozen=True):
    """What there is now, and counters since the sandbox was made."""

    running: int  # calls that hold a slot of a fork server
    queued: int  # calls that wait for one, or for an earlier cell of their notebook
    gradings: int  # under way, waiting or running
    done: int  # calls that have ended, failed and stopped ones included
    graded: int  # gradings that have ended
    busy_s: float  # during which at least one call ran
    running_s: float  # summed over calls
    queued_s: float  # summed over calls


class Gauge:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._running = self._queued = self._gradings = self._done = self._graded = 0
        self._busy_s = self._running_s = self._queued_s = 0.0

    @contextmanager
    def call(self) -> Generator[None]:
        """From a call's arrival to its end."""
        self._change(queued=1)
        try:
            yield
        finally:
            self._change(queued=-1)
            self._done += 1

    @contextmanager
    def slot(self) -> Generator[None]:
        """While a call holds a slot; a notebook that is made again takes one for each of its cells."""
        self._change(running=1, queued=-1)
        try:
            yield
        finally:
            self._change(running=-1, queued=1)

    @contextmanager
    def grading(self) -> Generator[None]:
        self._gradings += 1
        try:
            yield
        finally:
            self._gradings -= 1
            self._graded += 1

    def load(self) -> SandboxLoad:
        self._change()
        return SandboxLoad(
            running=self._running,
            queued=self._queued,
            gradings=self._gradings,
            done=self._done,
            graded=self._graded,
            busy_s=self._busy_s,
            running_s=self._running_s,
            queued_s=self._queued_s,
        )

    def _change(self, running: int = 0, queued: int = 0) -> None:
        now = self._clock()
        since, self._at = now - self._at, now
        self._busy_s += since if self._running else 0.0
        self._running_s += since * self._running
        self._queued_s += since * self._queued
        self._running += running
        self._queued += queued
