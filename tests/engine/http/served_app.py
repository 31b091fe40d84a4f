"""Serves an aiohttp application on loopback during a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serving_app(app: web.Application, port: int = 0, shutdown_timeout_s: float = 0.0) -> AsyncIterator[str]:
    """Yield the base URL. Port 0 selects a free port."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        # Accept pending connections first: the server would leave their sockets open when it closes.
        await _run_ready_callbacks()
        for site in list(runner.sites):
            await site.stop()
        await _run_ready_callbacks()  # a connection that is made while `cleanup` waits would stay open
        await runner.cleanup()


async def _run_ready_callbacks() -> None:
    for _ in range(3):
        await asyncio.sleep(0)
