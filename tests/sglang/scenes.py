"""Scenes on an engine before a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from bus.messages import WeightsPublished
from engine.contract import Capacity, GenerationRequest
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from engine.sglang.protocol import ServerInfo

ORDINARY = 400  # ids below are no special tokens


class Running:
    """A server that somebody else has started."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def start(self) -> str:
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return self._url

    @property
    def died(self) -> asyncio.Future[str]:
        return self._died

    async def close(self) -> None:
        pass


class FromFolder:
    """Takes `WeightsPublished.path` for a checkpoint's folder."""

    def check(self, server: ServerInfo) -> None:
        pass

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        await client.pause("in_place")
        await client.update_from_disk(Path(weights.path), str(weights.version), flush_cache=False)
        await client.resume()

    async def close(self) -> None:
        pass


def on_engine(
    url: str,
    model: Path,
    scene: Callable[[SGLangEngine, Capacity], Awaitable[None]],
    *,
    sequence_tokens: int = 900,
    **options: Any,
) -> None:
    async def play() -> None:
        engine = SGLangEngine(
            Running(url), FromFolder(), model=model, sequence_tokens=sequence_tokens, poll_s=0.05, **options
        )
        capacity = await engine.start()
        try:
            await scene(engine, capacity)
        finally:
            await engine.close()

    asyncio.run(play())


def request(number: int, new_tokens: int = 24, length: int = 20, **settings: Any) -> GenerationRequest:
    ids = np.random.default_rng(number).integers(0, ORDINARY, length, dtype=np.int32)
    return GenerationRequest(number, ids, new_tokens, **{"seed": number, **settings})


async def until_generated(engine: SGLangEngine, tokens: int) -> None:
    """So many since the engine's start."""
    while engine.load().generated_tokens < tokens:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.02)
