"""Pauses one server, updates its weights and releases its GPU memory.

One operation runs at a time, and the engine sends no request meanwhile. Released memory loses the
weights and the KV cache in it. A busy server crashes when its memory is released, so the engine
first waits until the server is idle, and then pauses it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sized
from typing import Literal

import structlog

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights import WeightTransport
from asterism.engine.sglang.weights.adapters import AdapterTransport

IDLE_TIMEOUT_S = 60.0  # time for aborted requests to end on the server
MemoryTag = Literal["weights", "kv_cache"]
_MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")


class ServerControl:
    def __init__(self, transport: WeightTransport | AdapterTransport) -> None:
        self.sending_allowed = asyncio.Event()  # set while requests can be sent to the server
        # Loop time of the last response, or of the last change that can have delayed responses.
        self.last_activity_at = 0.0
        self._transport = transport
        self._released: set[MemoryTag] = set()
        self._paused = False
        self._lock = asyncio.Lock()
        self._logger = structlog.get_logger()

    async def load_weights(
        self, client: SGLangClient, weights: WeightsPublished, end_requests: Callable[[], Awaitable[None]]
    ) -> str | None:
        """Load new weights; return the adapter for later requests, or None if the server's own weights are new.

        `end_requests`: ends all requests of the server. Raises WeightsRefused if the old weights stay, EngineFailure if
        the weights are incomplete.
        """
        adapter = None
        async with self._lock:
            self.sending_allowed.clear()
            try:
                await self._resume_memory(client, "weights")
                if isinstance(self._transport, AdapterTransport):
                    adapter = await self._transport.update(client, weights, end_requests)
                else:
                    await self._transport.update(client, weights)
                await self._resume_memory(client, "kv_cache")
                if self._paused:
                    await client.pause("in_place")
            finally:
                self._update_sending_allowed()
        return adapter

    async def pause(self, client: SGLangClient) -> None:
        """Pause the server in place: running requests keep their KV cache."""
        async with self._lock:
            self._paused = True
            self._update_sending_allowed()
            try:
                await client.pause("in_place")
            except EngineFailure:
                self._paused = False
                self._update_sending_allowed()
                raise

    async def resume(self, client: SGLangClient) -> None:
        async with self._lock:
            await client.resume()
            self._paused = False
            self._update_sending_allowed()

    async def release_memory(self, client: SGLangClient, pending: Sized) -> None:
        """Release the GPU memory. Raises EngineFailure if a request is pending or the server does not become idle."""
        async with self._lock:
            if pending:
                raise EngineFailure(f"{len(pending)} requests are pending")
            self.sending_allowed.clear()
            try:
                await self._release_memory(client)
            finally:
                self._update_sending_allowed()

    def _update_sending_allowed(self) -> None:
        self.last_activity_at = asyncio.get_running_loop().time()
        if self._paused or self._released:
            self.sending_allowed.clear()
        else:
            self.sending_allowed.set()

    async def _release_memory(self, client: SGLangClient) -> None:
        tags: list[MemoryTag] = [tag for tag in _MEMORY_TAGS if tag not in self._released]
        if not tags:
            return
        if not await client.flush_cache(IDLE_TIMEOUT_S):
            raise EngineFailure(f"the server was not idle within {IDLE_TIMEOUT_S:g} s")
        await client.pause("in_place")
        if isinstance(self._transport, AdapterTransport):
            self._transport.forget_base()
        await client.release_memory(tags)
        self._released.update(tags)
        self._logger.info("memory.released", parts=tags)

    async def _resume_memory(self, client: SGLangClient, tag: MemoryTag) -> None:
        """Allocate the memory again if the server has released it."""
        if tag in self._released:
            await client.resume_memory([tag])
            self._released.discard(tag)
            self._logger.info("memory.resumed", part=tag)
