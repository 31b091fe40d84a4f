"""The gauge of invariant 6: how late the event loop serves a timer."""

from __future__ import annotations

import asyncio

import structlog

TICK_S = 0.1
REPORT_S = 10.0


async def measure_loop_lag() -> None:
    """Runs until cancelled; logs the worst lag of each report's time."""
    loop = asyncio.get_running_loop()
    logger = structlog.get_logger()
    while True:
        worst, end = 0.0, loop.time() + REPORT_S
        while (now := loop.time()) < end:
            await asyncio.sleep(TICK_S)
            worst = max(worst, loop.time() - now - TICK_S)
        logger.info("loop.measured", worst_lag_s=round(worst, 4))
