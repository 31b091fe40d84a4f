"""Runs an engine during a test."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeVar

from asterism.engine.contract import Capacity, Engine

AnyEngine = TypeVar("AnyEngine", bound=Engine)


@asynccontextmanager
async def started(engine: AnyEngine) -> AsyncGenerator[tuple[AnyEngine, Capacity]]:
    """Start the engine. At the end, close it twice, even if the start has failed."""
    try:
        yield engine, await engine.start()
    finally:
        await engine.close()
        await engine.close()
