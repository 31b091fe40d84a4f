"""The executor's load in the structured log: each second while something runs or waits, and once more afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from msgspec.structs import asdict

from sandbox.gauge import SandboxLoad

EVERY_S = 1.0


async def report_load(executor: str, slots: int, load: Callable[[], SandboxLoad]) -> None:
    """Runs until cancelled, and then says the last. `executor` is this life of it, `slots` what the launcher has heard."""
    logger = structlog.get_logger()
    before = SandboxLoad(0, 0, 0, 0, 0, 0.0, 0.0, 0.0)

    def report() -> SandboxLoad:
        now = load()
        if now != before:
            logger.info("executor.load", executor=executor, slots=slots, **asdict(now))
        return now

    try:
        while True:
            await asyncio.sleep(EVERY_S)
            before = report()
    finally:
        report()
