"""The process's time: seconds since the epoch, which never go back when somebody sets the machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock(not_before: float = 0.0) -> Clock:
    """`not_before` is the last time that an earlier life of the process has logged."""
    start = max(time.time(), not_before) - time.monotonic()
    return lambda: start + time.monotonic()
