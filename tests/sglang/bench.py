"""SGLang engines before real servers, for the cases of the engine's contract. All share a server, which outlives each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from engine.contract import Capacity, Engine
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SGLangEngine
from engine.sglang.fit import Wanted
from engine.sglang.server import SGLangServer
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.disk import DiskWeights
from engine.sglang.weights.published import PublishedLayout
from engine.weights import WeightsPublisher
from tests.engine.contract.bench import Traits
from tests.sglang.serving import LONGEST

PAGE = 16
TRAITS = Traits(logprob_error=2e-4, max_running=16, prefix_tokens=PAGE, forgets=False, long_turn=500, look_s=0.02)
TRAITS_IN_BFLOAT16 = TRAITS._replace(logprob_error=0.2, prefix_tokens=1)


class Shared:
    """A server that is started when it is first needed, and again after it has died."""

    def __init__(self, wanted: Wanted, folder: Path, name: str) -> None:
        self.wanted, self.log = wanted, folder / f"{name}.log"
        self.server = SGLangServer(wanted, log=self.log, scratch=folder / name)
        self._running = False

    async def start(self) -> None:
        if self._running and self.server.died.done():
            await self.close()
        if not self._running:
            await self.server.start()
            self._running = True

    async def close(self) -> None:
        await self.server.close()
        self._running = False


class Lent:
    """A shared server, as an engine has it: where that closes it, it goes on."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def start(self) -> str:
        await self._shared.start()
        return self._shared.server.url

    @property
    def died(self) -> asyncio.Future[str]:
        return self._shared.server.died

    async def close(self) -> None:
        pass


class SGLangBench:
    def __init__(
        self,
        shared: Shared,
        scarce: Shared,
        folder: Path,
        traits: Traits = TRAITS,
        connect: Callable[[str], SGLangClient] = SGLangClient,
    ) -> None:
        self.model, self.traits, self._connect = shared.wanted.model, traits, connect
        self.publisher = WeightsPublisher(folder / "slots")
        self._shared, self._scarce, self._folder = shared, scarce, folder

    @asynccontextmanager
    async def engine(
        self, *, scarce: bool = False, max_pending: int = 100
    ) -> AsyncGenerator[tuple[SGLangEngine, Capacity]]:
        engine = self._made(self._scarce if scarce else self._shared, max_pending)
        try:
            yield engine, await engine.start()
        finally:
            await engine.close()
            await engine.close()

    def unstarted(self) -> SGLangEngine:
        return self._made(self._shared, 100)

    async def end_abruptly(self, engine: Engine) -> None:
        server = self._shared.server
        victim = next(pid for pid, name in server.processes().items() if "scheduler" in name)
        os.kill(victim, signal.SIGKILL)

    def _made(self, shared: Shared, max_pending: int) -> SGLangEngine:
        layout = PublishedLayout(self.model, getattr(torch, shared.wanted.engine.dtype))
        checksums = Checksums(self._folder / "checksums", "sglang-0")
        weights = DiskWeights(layout, checksums, self._folder / "for_server")
        return SGLangEngine(
            Lent(shared),
            weights,
            model=self.model,
            sequence_tokens=LONGEST,
            max_pending=max_pending,
            connect=self._connect,
            poll_s=0.05,
        )


def with_client(loop: asyncio.Runner, shared: Shared, scene: Callable[[SGLangClient], Awaitable[None]]) -> None:
    async def play() -> None:
        client = SGLangClient(shared.server.url)
        try:
            await scene(client)
        finally:
            await client.close()

    loop.run(play())
