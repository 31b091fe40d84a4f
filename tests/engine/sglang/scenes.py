"""Builds an SGLang engine with a fake server and a fake weight transport, and requests to the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, Generation, GenerationRequest
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.sglang_engine import SGLangEngine
from asterism.engine.sglang.weights.adapters import AdapterTransport
from tests.engine.sglang.fake_server import FakeServer
from tests.engine.started_engines import started

VOCABULARY = 20


class FakeServerHandle:
    def __init__(self, url: str) -> None:
        self._url = url
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.closed = False

    async def start(self) -> str:
        return self._url

    async def close(self) -> None:
        self.closed = True


class FakeTransport:
    """A weight transport whose update waits for `may_finish`. Then it fails with `failure`, if set."""

    def __init__(self, failure: EngineFailure | None = None) -> None:
        self._failure = failure
        self.update_started, self.may_finish = asyncio.Event(), asyncio.Event()
        self.may_finish.set()

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        self.update_started.set()
        await self.may_finish.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        pass


def connect_client(base: str) -> SGLangClient:
    return SGLangClient(base, retry_delays_s=(0.0,))


@asynccontextmanager
async def running_engine(
    model: Path,
    server: FakeServer,
    transport: FakeTransport | AdapterTransport | None = None,
    connect: Callable[[str], SGLangClient] = connect_client,
    sequence_tokens: int = 100,
    **options: Any,
) -> AsyncIterator[SGLangEngine]:
    """Yield a started engine of this server. The engine closes its handle of the server."""
    async with server.serving() as url:
        handle = FakeServerHandle(url)
        engine = SGLangEngine(
            handle,
            transport or FakeTransport(),
            model=model,
            version=2,
            connect=connect,
            sequence_tokens=sequence_tokens,
            **options,
        )
        async with started(engine):
            yield engine
        assert handle.closed


async def generate_turn(model: Path, server: FakeServer, **request: Any) -> Generation:
    async with running_engine(model, server) as engine:
        return await engine.generate(make_request(**request))


def make_request(
    number: int = 1, *token_ids: int, new_tokens: int = 3, stop: tuple[int, ...] = ()
) -> GenerationRequest:
    ids = np.array(token_ids or (1, 2, 3), np.int32)
    return GenerationRequest(number, ids, new_tokens, stop_token_ids=stop, seed=2**63 + number)


async def wait_for_tokens(engine: SGLangEngine, count: int) -> None:
    while engine.get_load().generated_tokens < count:  # noqa: ASYNC110
        await asyncio.sleep(0)
