"""Sends new weights to a server without a folder, and opens the published parameters that all transports send.

disk    in disk_transport.py
ipc     in ipc_transport.py
tensor  request bodies, in buckets: needs no shared folder or other connection
group   a process group with the server's ranks, in buckets: gloo, or nccl between GPUs
"""

import asyncio
import os
import pickle
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure, WeightsRefused
from asterism.engine.http.errors import ServerStatusError
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import ServerInfo, UpdateRefused
from asterism.engine.sglang.weights import TransportParts
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.collective_thread import CollectiveThread
from asterism.engine.sglang.weights.server_parameters import compute_expected_checksums
from asterism.engine.weight_transfer.shared_memory import open_published
from asterism.engine.weight_transfer.slot_mappings import SlotMappings
from asterism.engine.weight_transfer.weight_layout import WeightLayout

Bucket = Mapping[str, Tensor]
_VERIFYING_THREADS = 4  # threads of one engine; several engines of a node verify at the same time
_HOST = "127.0.0.1"  # this machine's address for the server
# Texts in a server's refusal that mean that the server had started to write.
_PARTIAL_UPDATE_MARKERS = ("partially updated", "Rolling back")


@asynccontextmanager
async def open_parameters(
    weights: WeightsPublished, layout: WeightLayout, mappings: SlotMappings | None = None
) -> AsyncGenerator[Bucket]:
    """Yield views of the published parameters, without lm_head for tied embeddings; the server uses the embedding."""
    opened = open_published(weights, layout, mappings, threads=_VERIFYING_THREADS)
    with ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, opened)


def split_into_buckets(parameters: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Split the parameters in order; a bucket exceeds `bucket_bytes` only if it holds a single parameter."""
    bucket: dict[str, Tensor] = {}
    filled_bytes = 0
    for name, parameter in parameters.items():
        if bucket and filled_bytes + parameter.nbytes > bucket_bytes:
            yield bucket
            bucket, filled_bytes = {}, 0
        bucket[name] = parameter
        filled_bytes += parameter.nbytes
    if bucket:
        yield bucket


def copy_tensors(bucket: Bucket) -> dict[str, Tensor]:
    """Copy the tensors into memory of their own: pickling a view saves the whole memory behind the view."""
    return {name: tensor.clone() for name, tensor in bucket.items()}


def _pickle_bucket(bucket: Bucket) -> bytes:
    return pickle.dumps(list(copy_tensors(bucket).items()), protocol=4)


# ---------------------------------------------------------------- updates while requests are paused


class UpdateProgress:
    """Records how much of one version the server has loaded."""

    def __init__(self) -> None:
        self.any_loaded = False


@asynccontextmanager
async def generation_paused(
    client: SGLangClient, weights: WeightsPublished, parameters: Bucket, checksums: ChecksumRegistry
) -> AsyncGenerator[UpdateProgress]:
    """Pause requests in place, and resume them after a successful or refused update to `parameters`.

    A server's refusal becomes WeightsRefused if the old weights are complete. After a partial or wrong load it becomes
    EngineFailure, and requests stay paused.
    """
    progress, server = UpdateProgress(), await client.get_server_info()
    expected = [
        await asyncio.to_thread(compute_expected_checksums, parameters, server, tp_rank, weights.version)
        for tp_rank in range(server.tp_size)
    ]
    await client.pause("in_place")
    try:
        yield progress
        progress.any_loaded = True
        await client.flush_cache()
        await _verify_version(client, weights)
        checksums.verify(weights, server, await client.compute_checksums(), expected)
    except (UpdateRefused, ServerStatusError, WeightsRefused) as refusal:
        if progress.any_loaded or any(marker in str(refusal) for marker in _PARTIAL_UPDATE_MARKERS):
            raise EngineFailure(f"weights of version {weights.version} are partially loaded: {refusal}") from refusal
        await client.resume()
        raise WeightsRefused(f"the server refused version {weights.version}: {refusal}") from refusal
    await client.resume()


async def _verify_version(client: SGLangClient, weights: WeightsPublished) -> None:
    loaded_version = (await client.get_model_info()).weight_version
    if loaded_version != str(weights.version):
        raise EngineFailure(f"the server reports version {loaded_version} after an update to {weights.version}")


async def update_in_buckets(
    client: SGLangClient,
    weights: WeightsPublished,
    parameters: Bucket,
    checksums: ChecksumRegistry,
    bucket_bytes: int,
    send: Callable[[Bucket, str | None], Awaitable[None]],
) -> None:
    """Pause requests and send all buckets; the last one has the version, the others have None."""
    buckets = list(split_into_buckets(parameters, bucket_bytes))
    async with generation_paused(client, weights, parameters, checksums) as progress:
        await _begin_update(client)
        try:
            for number, bucket in enumerate(buckets, 1):
                await send(bucket, str(weights.version) if number == len(buckets) else None)
                progress.any_loaded = True
        except (UpdateRefused, ServerStatusError):
            await client.end_update()
            raise
        await client.end_update()


async def _begin_update(client: SGLangClient) -> None:
    """Close an update that an earlier process left open."""
    try:
        await client.begin_update()
    except UpdateRefused as refusal:
        if "already open" not in str(refusal):
            raise
        await client.end_update()
        await client.begin_update()


# ---------------------------------------------------------------- transports


class TensorTransport:
    """A transport by request bodies: pickles of [(name, tensor), ...], which each rank receives whole."""

    def __init__(self, parts: TransportParts) -> None:
        self._parts = parts

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        server = await client.get_server_info()

        async def send(bucket: Bucket, version: str | None) -> None:
            payload = await asyncio.to_thread(_pickle_bucket, bucket)
            await client.update_from_tensor([payload] * server.tp_size, version)

        async with open_parameters(weights, self._parts.layout) as parameters:
            await update_in_buckets(client, weights, parameters, self._parts.checksums, self._parts.bucket_bytes, send)

    async def close(self) -> None:
        """Do nothing: no resource stays open between updates."""


class ProcessGroupTransport:
    """A transport by a process group, which is created at the first update and reused. A failure closes
    the group; the next update creates a new one. With nccl, this process needs a GPU of its own."""

    def __init__(self, parts: TransportParts) -> None:
        self._parts = parts
        self.group: CollectiveThread | None = None

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        async with open_parameters(weights, self._parts.layout) as parameters:
            await self._broadcast(client, weights, parameters)

    async def _broadcast(self, client: SGLangClient, weights: WeightsPublished, parameters: Bucket) -> None:
        group = self.group or await self._join(client, await client.get_server_info())

        async def send(bucket: Bucket, version: str | None) -> None:
            server_call = client.update_from_group(bucket, group.name, version)
            await self._run_both(group.broadcast(list(bucket.values())), server_call)

        try:
            await update_in_buckets(client, weights, parameters, self._parts.checksums, self._parts.bucket_bytes, send)
        except WeightsRefused:
            await self._destroy_group(client, group)
            raise
        except BaseException:
            self._leave()
            raise

    async def close(self) -> None:
        self._leave()

    async def _join(self, client: SGLangClient, server: ServerInfo) -> CollectiveThread:
        name = f"asterism-{os.getpid()}-{secrets.token_hex(4)}"  # a server accepts each name only once
        world_size = 1 + server.tp_size
        group = self.group = CollectiveThread(name, self._parts.group_backend, _HOST, world_size, self._parts.timeout_s)
        server_call = client.init_group(_HOST, group.port, world_size, name, self._parts.group_backend)
        try:
            await self._run_both(group.join(), server_call)
        except (UpdateRefused, ServerStatusError) as refusal:
            await self._destroy_group(client, group)
            raise WeightsRefused(f"could not create a process group with the server: {refusal}") from refusal
        return group

    async def _run_both(self, local_future: asyncio.Future[None], server_call: Coroutine[Any, Any, None]) -> None:
        """Run this side of a collective and the call that makes the server take part.

        If either fails, this side leaves the group, so that the other side fails, too. Raises the
        server's error, or EngineFailure if the server does not respond.
        """
        server_future = asyncio.ensure_future(server_call)
        try:
            await asyncio.wait((local_future, server_future), return_when=asyncio.FIRST_EXCEPTION)
            if not (_has_succeeded(local_future) and _has_succeeded(server_future)):
                self._leave()
                await asyncio.wait((server_future,), timeout=self._parts.response_timeout_s)
        except asyncio.CancelledError:
            self._leave()
            raise
        finally:
            server_future.cancel()
            for future in (local_future, server_future):
                future.add_done_callback(_has_succeeded)  # asyncio logs an exception that is never retrieved
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
        if self.group is not None:
            self.group.close()
            self.group = None

    async def _destroy_group(self, client: SGLangClient, group: CollectiveThread) -> None:
        """Close the group on both sides; ignore failures of the server."""
        self._leave()
        with suppress(EngineFailure):
            await client.destroy_group(group.name)


def _has_succeeded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
