"""Transfers weights over a process group with the server's ranks: gloo, or nccl between GPUs.

The group is created at the first update and reused. Any failure closes it; the next update creates
a new one. With nccl, this process needs a GPU that the server does not use.
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
from engine.sglang.errors import ServerStatusError, UpdateRefused
from engine.sglang.http_api import ServerInfo
from engine.sglang.weights.buckets import PublishedLayout, split_into_buckets
from engine.sglang.weights.checksums import ChecksumRegistry
from engine.sglang.weights.collective_thread import CollectiveThread
from engine.sglang.weights.update_window import check_single_replica, generation_paused, get_bucket_version, update_open


class ProcessGroupTransport:
    def __init__(
        self,
        layout: PublishedLayout,
        checksums: ChecksumRegistry,
        bucket_bytes: int,
        backend: Literal["gloo", "nccl"] = "gloo",
        host: str = "127.0.0.1",
        timeout_s: float = 300.0,
        response_timeout_s: float = 10.0,
    ) -> None:
        """`host`: this machine's address for the server. `timeout_s`: limit for joining and for
        each bucket. `response_timeout_s`: limit for the server to report an error after this side
        has left the group."""
        self._layout = layout
        self._checksums = checksums
        self._bucket_bytes = bucket_bytes
        self._backend = backend
        self._host = host
        self._timeout_s = timeout_s
        self._response_timeout_s = response_timeout_s
        self._group: CollectiveThread | None = None

    @property
    def group_name(self) -> str | None:
        """The current group's name on the server."""
        return self._group.name if self._group else None

    def check(self, server: ServerInfo) -> None:
        check_single_replica("group", server)

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        server = await client.get_server_info()
        self.check(server)
        parameters = await asyncio.to_thread(self._layout.read, weights)
        buckets = list(split_into_buckets(parameters, self._bucket_bytes))
        group = self._group or await self._join(client, server)
        try:
            async with generation_paused(client, weights, self._checksums) as progress, update_open(client):
                for number, bucket in enumerate(buckets):
                    await self._send_bucket(client, group, bucket, get_bucket_version(number, buckets, weights))
                    progress.any_loaded = True
        except WeightsRefused:
            await self._destroy_group(client, group)
            raise
        except BaseException:
            self._leave()
            raise

    async def close(self) -> None:
        self._leave()

    async def _join(self, client: SGLangClient, server: ServerInfo) -> CollectiveThread:
        # A server accepts a name only once.
        name = f"asterism-{os.getpid()}-{secrets.token_hex(4)}"
        world_size = 1 + server.tp_size
        group = self._group = CollectiveThread(name, self._backend, self._host, world_size, self._timeout_s)
        server_call = client.weights.init_group(self._host, group.port, 1, world_size, name, self._backend)
        try:
            await self._run_both(group.join(), server_call)
        except (UpdateRefused, ServerStatusError) as refusal:
            await self._destroy_group(client, group)
            raise WeightsRefused(f"could not create a process group with the server: {refusal}") from refusal
        return group

    async def _send_bucket(
        self, client: SGLangClient, group: CollectiveThread, bucket: Mapping[str, Tensor], version: str | None
    ) -> None:
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()]
        shapes = [list(tensor.shape) for tensor in bucket.values()]
        server_call = client.weights.update_from_group(
            list(bucket), dtypes, shapes, group.name, version, flush_cache=False
        )
        await self._run_both(group.broadcast(list(bucket.values())), server_call)

    async def _run_both(self, local_future: asyncio.Future[None], server_call: Coroutine[Any, Any, None]) -> None:
        """Runs this side of a collective and the call that makes the server take part.

        If either fails, this side leaves the group, which makes the other fail too. Raises the
        server's error, or EngineFailure if the server does not respond.
        """
        server_future = asyncio.ensure_future(server_call)
        try:
            await asyncio.wait((local_future, server_future), return_when=asyncio.FIRST_EXCEPTION)
            if not (_has_succeeded(local_future) and _has_succeeded(server_future)):
                self._leave()
                await asyncio.wait((server_future,), timeout=self._response_timeout_s)
        except asyncio.CancelledError:
            self._leave()
            raise
        finally:
            server_future.cancel()
            for future in (local_future, server_future):
                future.add_done_callback(_has_succeeded)  # marks an exception as retrieved
        local_error = str(local_future.exception()) if local_future.done() and local_future.exception() else ""
        if not server_future.done() or server_future.cancelled():
            raise EngineFailure(f"the process group broke, and the server does not respond; local error: {local_error}")
        failure = server_future.exception()
        if isinstance(failure, UpdateRefused) and local_error:
            raise UpdateRefused(f"{failure}; local error: {local_error}") from failure
        if failure is not None:
            raise failure
        if local_error:
            raise EngineFailure(f"the server received the weights, but the broadcast failed locally: {local_error}")

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _destroy_group(self, client: SGLangClient, group: CollectiveThread) -> None:
        """Closes the group on both sides; ignores failures of the server."""
        self._leave()
        with suppress(EngineFailure):
            await client.weights.destroy_group(group.name)


def _has_succeeded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
