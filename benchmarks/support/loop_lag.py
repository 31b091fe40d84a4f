"""Measures the longest delay of an event loop."""

import asyncio
import contextlib
import time
from collections.abc import Generator

_INTERVAL_S = 0.005


class LoopLag:
    """The longest delay of a timer so far."""

    longest_s = 0.0

    async def measure(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due)


@contextlib.contextmanager
def measuring_lag() -> Generator[LoopLag]:
    lag = LoopLag()
    task = asyncio.get_running_loop().create_task(lag.measure())
    try:
        yield lag
    finally:
        task.cancel()
