"""Shared by all transports: pauses requests, opens and closes an update, classifies failures."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from torch import Tensor

from bus.messages import WeightsPublished
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.http_api import ServerStatusError, UpdateRefused
from engine.sglang.weights.checksums import ChecksumRegistry

Bucket = Mapping[str, Tensor]
# Texts in a server's refusal that mean that it had started to write.
_PARTIAL_UPDATE_MARKERS = ("partially updated", "Rolling back")


class UpdateProgress:
    """How much of one version the server has loaded."""

    def __init__(self) -> None:
        self.any_loaded = False


@asynccontextmanager
async def generation_paused(
    client: SGLangClient, weights: WeightsPublished, checksums: ChecksumRegistry
) -> AsyncGenerator[UpdateProgress]:
    """Pauses requests in place, and resumes them after a successful or refused update.

    A refusal by the server becomes WeightsRefused; if some weights are loaded, or wrong ones, it
    becomes EngineFailure and requests stay paused.
    """
    progress = UpdateProgress()
    await client.pause("in_place")
    try:
        yield progress
        progress.any_loaded = True
        await client.flush_cache()
        await _verify_loaded(client, weights, checksums)
    except (UpdateRefused, ServerStatusError, WeightsRefused) as refusal:
        if progress.any_loaded or any(marker in str(refusal) for marker in _PARTIAL_UPDATE_MARKERS):
            raise EngineFailure(f"weights of version {weights.version} are partially loaded: {refusal}") from refusal
        await client.resume()
        raise WeightsRefused(f"the server refused version {weights.version}: {refusal}") from refusal
    await client.resume()


async def _verify_loaded(client: SGLangClient, weights: WeightsPublished, checksums: ChecksumRegistry) -> None:
    loaded_version = (await client.get_model_info()).weight_version
    if loaded_version != str(weights.version):
        raise EngineFailure(f"the server reports version {loaded_version} after an update to {weights.version}")
    checksums.verify(weights, await client.get_server_info(), await client.compute_checksums())


async def update_in_buckets(
    client: SGLangClient,
    weights: WeightsPublished,
    checksums: ChecksumRegistry,
    buckets: Sequence[Bucket],
    send: Callable[[Bucket, str | None], Awaitable[None]],
) -> None:
    """Pauses requests and sends all buckets; the last one carries the version, the others None."""
    async with generation_paused(client, weights, checksums) as progress:
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
    """Closes an update that an earlier process left open."""
    try:
        await client.begin_update()
    except UpdateRefused as refusal:
        if "already open" not in str(refusal):
            raise
        await client.end_update()
        await client.begin_update()
