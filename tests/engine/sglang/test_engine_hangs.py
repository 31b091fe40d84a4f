"""Tests of the SGLang engine with a server that reports that it is ready, but generates nothing."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from asterism.engine.contract import EngineFailure
from asterism.engine.http.errors import ServerTimeout
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, GenerateResponse
from asterism.engine.sglang.sglang_engine import SGLangEngine
from tests.engine.sglang.fake_server import FakeServer, make_full_response, refusing, streaming
from tests.engine.sglang.scenes import make_request, running_engine

pytestmark = pytest.mark.real_clock
SLOW = "no response within 600 s"
HANGS = 19  # prompts with this token get no response


class SlowClients:
    """A factory of clients. For prompts with HANGS they raise ServerTimeout with `waited_s`, after
    `may_time_out` is set."""

    def __init__(self, waited_s: float) -> None:
        self._waited_s = waited_s
        self.request_sent, self.may_time_out = asyncio.Event(), asyncio.Event()

    def client(self, base: str) -> SGLangClient:
        slow = self

        class Client(SGLangClient):
            def generate_streamed(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
                return slow.time_out() if HANGS in request.input_ids else super().generate_streamed(request)

        return Client(base)

    async def time_out(self) -> AsyncGenerator[GenerateResponse, None]:
        self.request_sent.set()
        await self.may_time_out.wait()
        raise ServerTimeout(SLOW, self._waited_s)
        yield


@asynccontextmanager
async def hanging(
    model: Path, waited_s: float
) -> AsyncGenerator[tuple[SGLangEngine, SlowClients, FakeServer, list[str]]]:
    """Yield an engine, its clients and server, and the causes with which the engine was lost."""
    slow, lost, server = SlowClients(waited_s), list[str](), FakeServer(streaming(make_full_response))
    async with running_engine(model, server, connect=slow.client, on_engine_lost=lost.append) as engine:
        yield engine, slow, server, lost


async def test_a_server_that_generates_no_token_for_any_request_is_lost(model: Path):
    async with hanging(model, waited_s=0.0) as (engine, slow, _, lost):
        await engine.generate(make_request(0))
        calls = [asyncio.ensure_future(engine.generate(make_request(number, 1, HANGS))) for number in (1, 2)]
        await slow.request_sent.wait()
        slow.may_time_out.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(each) for each in results] == [f"the server no longer generates tokens: {SLOW}"] * 2
        with pytest.raises(EngineFailure, match="the server no longer generates tokens"):
            await engine.generate(make_request(3))
    assert lost == [f"the server no longer generates tokens: {SLOW}"]


@pytest.mark.parametrize("cause", ["another request", "a pause by the engine", "a pause by another client"])
async def test_a_server_that_generates_for_another_request_or_is_paused_is_not_lost(model: Path, cause: str):
    async with hanging(model, waited_s=600.0 if cause == "another request" else 0.0) as (engine, slow, server, lost):
        call = asyncio.ensure_future(engine.generate(make_request(1, 1, HANGS)))
        await slow.request_sent.wait()
        match cause:
            case "another request":
                await engine.generate(make_request(2))
            case "a pause by the engine":
                await engine.pause()
            case _:
                server.handlers["/ready"] = refusing(503, {})
        slow.may_time_out.set()
        with pytest.raises(ServerTimeout):
            await call
        await engine.resume()
        await engine.generate(make_request(3))
    assert lost == []
