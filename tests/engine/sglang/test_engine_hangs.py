"""The SGLang engine before a server that says that it is ready, and generates nothing: as one whose scheduler is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from engine.contract import EngineFailure
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from engine.sglang.errors import ServerSlow
from engine.sglang.protocol import GenerateAnswer, GenerateRequest
from tests.engine.sglang.scenes import Attached, Way, request, serve, whole
from tests.engine.sglang.stand_in import StandIn, streaming

SLOW = "nothing came within 600 s"
HANGS = 19  # prompts with this token get no answer


class Waited:
    """Makes clients that find a request slow when they are told to, and say then that it was for `waited_s`."""

    def __init__(self, waited_s: float) -> None:
        self._waited_s = waited_s
        self.asked, self.over = asyncio.Event(), asyncio.Event()

    def client(self, base: str) -> SGLangClient:
        waited = self

        class Client(SGLangClient):
            def generate_streamed(self, request: GenerateRequest) -> AsyncGenerator[GenerateAnswer, None]:
                return waited.slow() if HANGS in request.input_ids else super().generate_streamed(request)

        return Client(base)

    async def slow(self) -> AsyncGenerator[GenerateAnswer, None]:
        self.asked.set()
        await self.over.wait()
        raise ServerSlow(SLOW, self._waited_s)
        yield


def test_a_server_that_generates_for_nobody_any_more_is_lost(model: Path):
    waited, lost = Waited(0.0), list[str]()

    async def scene(engine: SGLangEngine, *_: object) -> None:
        await engine.generate(request(0))
        calls = [asyncio.ensure_future(engine.generate(request(number, 1, HANGS))) for number in (1, 2)]
        await waited.asked.wait()
        waited.over.set()
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(each) for each in found] == [f"the server generates nothing any more: {SLOW}"] * 2
        with pytest.raises(EngineFailure, match="the server generates nothing any more"):
            await engine.generate(request(3))

    serve(model, StandIn(streaming(whole)), scene, connect=waited.client, lost=lost.append)
    assert lost == [f"the server generates nothing any more: {SLOW}"]


def test_a_turn_that_gets_nothing_while_another_is_answered_fails_alone(model: Path):
    waited, lost = Waited(600.0), list[str]()

    async def scene(engine: SGLangEngine, *_: object) -> None:
        call = asyncio.ensure_future(engine.generate(request(1, 1, HANGS)))
        await waited.asked.wait()
        await engine.generate(request(2))
        waited.over.set()
        with pytest.raises(ServerSlow):
            await call
        await engine.generate(request(3))

    serve(model, StandIn(streaming(whole)), scene, connect=waited.client, lost=lost.append)
    assert lost == []


def test_a_server_that_is_paused_is_not_lost_though_it_generates_nothing(model: Path):
    waited, lost = Waited(0.0), list[str]()

    async def scene(engine: SGLangEngine, attached: Attached, way: Way) -> None:
        call = asyncio.ensure_future(engine.generate(request(1, 1, HANGS)))
        await waited.asked.wait()
        await engine.pause()
        waited.over.set()
        with pytest.raises(ServerSlow):
            await call
        await engine.resume()
        await engine.generate(request(2))

    serve(model, StandIn(streaming(whole)), scene, connect=waited.client, lost=lost.append)
    assert lost == []


def test_a_server_that_somebody_else_has_paused_is_not_lost(model: Path):
    waited, lost, server = Waited(0.0), list[str](), StandIn(streaming(whole))

    async def scene(engine: SGLangEngine, *_: object) -> None:
        call = asyncio.ensure_future(engine.generate(request(1, 1, HANGS)))
        await waited.asked.wait()
        server.paused = True
        waited.over.set()
        with pytest.raises(ServerSlow):
            await call
        await engine.generate(request(2))

    serve(model, server, scene, connect=waited.client, lost=lost.append)
    assert lost == []
