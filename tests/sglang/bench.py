"""SGLang engines that share real servers, for the cases of the engine contract."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from asterism.engine.contract import Capacity, Engine
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.engine.sglang.sglang_engine import SGLangEngine
from asterism.engine.sglang.weights import TransportParts
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.disk_transport import DiskTransport
from asterism.engine.weight_transfer.weight_layout import load_layout
from tests.engine.contract.bench import Traits
from tests.engine.started_engines import started
from tests.engine.whole_publisher import WholePublisher
from tests.sglang.serving import LONGEST

PAGE = 16
TRAITS = Traits(logprob_error=2e-4, max_running=16, prefix_tokens=PAGE, forgets=False, long_turn=900, look_s=0.02)
TRAITS_IN_BFLOAT16 = TRAITS._replace(logprob_error=0.2, prefix_tokens=1)


class SharedServer:
    """A server that starts when a test first needs it, and starts again after its death."""

    def __init__(self, requirements: ServerRequirements, folder: Path, name: str) -> None:
        self.requirements, self.log = requirements, folder / f"{name}.log"
        self.server = SGLangServer(requirements, log=self.log, scratch=folder / name)
        self._running = False

    async def start(self) -> None:
        if self._running and self.server.death.done():
            await self.close()
        if not self._running:
            await self.server.start()
            self._running = True

    async def close(self) -> None:
        await self.server.close()
        self._running = False


class BorrowedServer:
    """A handle with which an engine uses a shared server; `close` does not stop the server."""

    def __init__(self, shared: SharedServer) -> None:
        self._shared = shared

    async def start(self) -> str:
        await self._shared.start()
        return self._shared.server.url

    @property
    def death(self) -> asyncio.Future[str]:
        return self._shared.server.death

    async def close(self) -> None:
        pass


class SGLangBench:
    def __init__(
        self,
        shared: SharedServer,
        scarce: SharedServer,
        folder: Path,
        traits: Traits = TRAITS,
        connect: Callable[[str], SGLangClient] = SGLangClient,
    ) -> None:
        self.model, self.traits, self._connect = shared.requirements.model, traits, connect
        self._dtype: torch.dtype = getattr(torch, shared.requirements.engine.dtype)
        self.publisher = WholePublisher(folder / "slots", self._dtype)
        self._shared, self._scarce, self._folder = shared, scarce, folder

    @asynccontextmanager
    async def engine(
        self, *, scarce: bool = False, max_pending: int = 100
    ) -> AsyncGenerator[tuple[SGLangEngine, Capacity]]:
        async with started(self._build_engine(self._scarce if scarce else self._shared, max_pending)) as running:
            yield running

    def unstarted(self) -> SGLangEngine:
        return self._build_engine(self._shared, 100)

    async def end_abruptly(self, engine: Engine) -> None:
        server = self._shared.server
        victim = next(pid for pid, name in server.list_processes().items() if "scheduler" in name)
        os.kill(victim, signal.SIGKILL)

    def _build_engine(self, shared: SharedServer, max_pending: int) -> SGLangEngine:
        layout = load_layout(self.model, self._dtype)
        checksums = ChecksumRegistry(self._folder / "checksums", "sglang-0")
        weights = DiskTransport(TransportParts(layout, checksums, self._folder / "for_server"))
        return SGLangEngine(
            BorrowedServer(shared),
            weights,
            model=self.model,
            sequence_tokens=LONGEST,
            max_pending=max_pending,
            connect=self._connect,
            load_poll_s=0.05,
        )
