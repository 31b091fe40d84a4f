"""Runs a weight server during a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from asterism.engine.weight_transfer.weight_server import WeightServer


@asynccontextmanager
async def serving(server: WeightServer) -> AsyncIterator[None]:
    running = asyncio.create_task(server.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait((running,))
        server.close()
