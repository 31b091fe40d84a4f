"""The process's time: seconds since the epoch that never go back, also if the system clock is set."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def make_steady_clock(not_before: float = 0.0) -> Clock:
    """`not_before` is the last time that an earlier incarnation of the process logged."""
    start = max(time.time(), not_before) - time.monotonic()
    return lambda: start + time.monotonic()
