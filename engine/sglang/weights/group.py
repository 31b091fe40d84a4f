"""Weights over a process group of this engine and its server's ranks: gloo, or nccl between GPUs.

The group is made at the first update and kept. What goes wrong in it, on either side, ends it; the next update makes
another. With nccl this process needs a GPU that is none of the server's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, Literal

from torch import Tensor

from bus.messages import WeightsPublished
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.errors import ServerRefused, UpdateRefused
from engine.sglang.protocol import ServerInfo
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.collective import Collective
from engine.sglang.weights.held import check_one_replica, held, opened, version_of
from engine.sglang.weights.published import PublishedLayout, buckets


class GroupWeights:
    def __init__(
        self,
        layout: PublishedLayout,
        checksums: Checksums,
        bucket_bytes: int,
        backend: Literal["gloo", "nccl"] = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 300.0,
        answer_s: float = 10.0,
    ) -> None:
        """`host` is this machine's address as the server reaches it; joining and each bucket may take `timeout_s`. When
        this side has left the group, a server has `answer_s` to notice and say so."""
        self._layout = layout
        self._checksums = checksums
        self._bucket_bytes = bucket_bytes
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._answer_s = answer_s
        self._group: Collective | None = None

    @property
    def group_name(self) -> str | None:
        """Of the group that there is now, as the server knows it."""
        return self._group.name if self._group else None

    def check(self, server: ServerInfo) -> None:
        check_one_replica("group", server)

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        server = await client.server_info()
        self.check(server)
        parameters = await asyncio.to_thread(self._layout.read, weights)
        parts = list(buckets(parameters, self._bucket_bytes))
        group = self._group or await self._join(client, server)
        try:
            async with held(client, weights, self._checksums) as loading, opened(client):
                for number, part in enumerate(parts):
                    await self._send(client, group, part, version_of(number, parts, weights))
                    loading.begun = True
        except WeightsRefused:
            await self._forget(client, group)
            raise
        except BaseException:
            self._leave()
            raise

    async def close(self) -> None:
        self._leave()

    async def _join(self, client: SGLangClient, server: ServerInfo) -> Collective:
        name = f"asterism-{os.getpid()}-{secrets.token_hex(4)}"  # a server takes a name once
        world_size = 1 + server.tp_size
        group = self._group = Collective(name, self._backend, self._host, world_size, self._timeout_s)
        asked = client.init_group(self._host, group.port, 1, world_size, name, self._backend)
        try:
            await self._both(group.join(), asked)
        except (UpdateRefused, ServerRefused) as refusal:
            await self._forget(client, group)
            raise WeightsRefused(f"no group with the server: {refusal}") from refusal
        return group

    async def _send(
        self, client: SGLangClient, group: Collective, part: Mapping[str, Tensor], version: str | None
    ) -> None:
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in part.values()]
        shapes = [list(tensor.shape) for tensor in part.values()]
        answer = client.update_from_group(list(part), dtypes, shapes, group.name, version, flush_cache=False)
        await self._both(group.broadcast(list(part.values())), answer)

    async def _both(self, ours: asyncio.Future[None], call: Coroutine[Any, Any, None]) -> None:
        """Our part in a collective, and the call that makes the server take part. Where either fails this side leaves the
        group, which makes the other fail too. Raises what the server says, or EngineFailure if it says nothing."""
        theirs = asyncio.ensure_future(call)
        try:
            await asyncio.wait((ours, theirs), return_when=asyncio.FIRST_EXCEPTION)
            if not (_succeeded(ours) and _succeeded(theirs)):
                self._leave()
                await asyncio.wait((theirs,), timeout=self._answer_s)
        except asyncio.CancelledError:
            self._leave()
            raise
        finally:
            theirs.cancel()
            for future in (ours, theirs):
                future.add_done_callback(_succeeded)  # which looks at what nobody else may
        here = str(ours.exception()) if ours.done() and ours.exception() else ""
        if not theirs.done() or theirs.cancelled():
            raise EngineFailure(f"the group broke, and the server does not answer; here: {here}")
        failure = theirs.exception()
        if isinstance(failure, UpdateRefused) and here:
            raise UpdateRefused(f"{failure}; here: {here}") from failure
        if failure is not None:
            raise failure
        if here:
            raise EngineFailure(f"weights were received, but: {here}")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _forget(self, client: SGLangClient, group: Collective) -> None:
        """On the server's side too, if it can."""
        self._leave()
        with suppress(EngineFailure):
            await client.destroy_group(group.name)


def _succeeded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
