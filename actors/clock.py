"""The process's time: seconds since the epoch, which never go back when somebody sets the machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


def steady_clock() -> Clock:
    start = time.time() - time.monotonic()
    return lambda: start + time.monotonic()
