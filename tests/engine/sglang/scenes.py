"""Scenes on an SGLang engine before a stand-in of its server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from structlog.testing import capture_logs

from bus.messages import WeightsPublished
from engine.contract import EngineFailure, GenerationRequest
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from engine.sglang.protocol import ServerInfo
from tests.engine.sglang.stand_in import LENGTH, StandIn, answer

VOCABULARY = 20


class Attached:
    def __init__(self, url: str) -> None:
        self._url = url
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.closed = False

    async def start(self) -> str:
        return self._url

    @property
    def died(self) -> asyncio.Future[str]:
        return self._died

    async def close(self) -> None:
        self.closed = True


class Way:
    """Takes weights as `update` says."""

    def __init__(self, failure: EngineFailure | None = None) -> None:
        self._failure = failure
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    def check(self, server: ServerInfo) -> None:
        pass

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        self.begun.set()
        await self.go_on.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        pass


Scene = Callable[[SGLangEngine, Attached, Way], Awaitable[None]]


def connected(base: str) -> SGLangClient:
    return SGLangClient(base, back_off_s=(0.0,))


def serve(
    model: Path,
    server: StandIn,
    scene: Scene,
    failure: EngineFailure | None = None,
    connect: Callable[[str], SGLangClient] = connected,
    **options: Any,
) -> list[dict[str, Any]]:
    """The log's lines."""

    async def play() -> None:
        async with server.serving() as url:
            attached, way = Attached(url), Way(failure)
            engine = SGLangEngine(
                attached,
                way,
                model=model,
                version=2,
                connect=connect,
                **{"sequence_tokens": 100, **options},
            )
            await engine.start()
            try:
                await scene(engine, attached, way)
            finally:
                await engine.close()
                await engine.close()
            assert attached.closed

    with capture_logs() as lines:
        asyncio.run(play())
    return [dict(line) for line in lines]


def request(number: int = 1, *token_ids: int, new_tokens: int = 3, stop: tuple[int, ...] = ()) -> GenerationRequest:
    ids = np.array(token_ids or (1, 2, 3), np.int32)
    return GenerationRequest(number, ids, new_tokens, stop_token_ids=stop, seed=2**63 + number)


def whole(body: dict[str, Any]) -> dict[str, Any]:
    return answer(body, [4, 5, 6], LENGTH)


async def until_tokens(engine: SGLangEngine, count: int) -> None:
    while engine.load().generated_tokens < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
