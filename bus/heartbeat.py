"""Heartbeats: a process says that its event loop turns, how late it serves a timer, and how much waits in its queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import structlog

from bus.messages import Heartbeat
from bus.transport import Bus

LAUNCHER = "launcher"
TICK_S = 0.1
REPORT_S = 10.0  # between two lines of the log


@asynccontextmanager
async def beating(bus: Bus, life: int, every_s: float, to: str = LAUNCHER) -> AsyncGenerator[None]:
    """One heartbeat at once and then every `every_s`, as long as the context is open."""
    beat = asyncio.create_task(_beat(bus, life, every_s, to), name="heartbeat")
    try:
        yield
    finally:
        beat.cancel()


async def _beat(bus: Bus, life: int, every_s: float, to: str) -> None:
    loop, logger = asyncio.get_running_loop(), structlog.get_logger()
    worst_of_report, report_at, lag_s = 0.0, loop.time() + REPORT_S, 0.0
    while True:
        waiting, unacknowledged = bus.waiting, sum(bus.unacknowledged.values())
        await bus.send(to, Heartbeat(bus.process, life, round(lag_s, 4), waiting, unacknowledged))
        lag_s = await _worst_lag(every_s)
        worst_of_report = max(worst_of_report, lag_s)
        if loop.time() >= report_at:
            logger.info(
                "loop.measured", worst_lag_s=round(worst_of_report, 4), waiting=waiting, unacknowledged=unacknowledged
            )
            worst_of_report, report_at = 0.0, loop.time() + REPORT_S


async def _worst_lag(seconds: float) -> float:
    """How late a timer was served at worst, within so many seconds (invariant 6)."""
    loop = asyncio.get_running_loop()
    worst, end = 0.0, loop.time() + seconds
    while (now := loop.time()) < end:
        tick_s = min(TICK_S, end - now)
        await asyncio.sleep(tick_s)
        worst = max(worst, loop.time() - now - tick_s)
    return worst
