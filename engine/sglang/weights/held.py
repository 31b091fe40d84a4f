"""What every way does around its update: holds the requests, opens and closes the update, says what a failure left."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from bus.messages import WeightsPublished
from configs.errors import UnusableInput
from engine.contract import EngineFailure, WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.errors import ServerRefused, UpdateRefused
from engine.sglang.protocol import ServerInfo
from engine.sglang.weights.checksums import Checksums

# In a server's refusal: it had begun to write.
_SPOILED = ("partially updated", "Rolling back")


class Loading:
    """What the server has been given of one version."""

    def __init__(self) -> None:
        self.begun = False  # some of it is loaded


@asynccontextmanager
async def held(client: SGLangClient, weights: WeightsPublished, checksums: Checksums) -> AsyncGenerator[Loading]:
    """Requests are held in place meanwhile. What the server refuses inside becomes WeightsRefused, after which they go
    on; or EngineFailure, after which they do not, if some of the weights are loaded, or others than were given."""
    loading = Loading()
    await client.pause("in_place")
    try:
        yield loading
        loading.begun = True
        await client.flush_cache()
        await _confirm(client, weights, checksums)
    except (UpdateRefused, ServerRefused, WeightsRefused) as refusal:
        if loading.begun or any(sign in str(refusal) for sign in _SPOILED):
            raise EngineFailure(f"weights of version {weights.version} are loaded in part: {refusal}") from refusal
        await client.resume()
        raise WeightsRefused(f"the server did not take version {weights.version}: {refusal}") from refusal
    await client.resume()


async def _confirm(client: SGLangClient, weights: WeightsPublished, checksums: Checksums) -> None:
    held_version = (await client.model_info()).weight_version
    if held_version != str(weights.version):
        raise EngineFailure(f"the server says that it has version {held_version}, it was given {weights.version}")
    checksums.compare(weights, await client.server_info(), await client.checksums())


@asynccontextmanager
async def opened(client: SGLangClient) -> AsyncGenerator[None]:
    """Between begin_update and end_update. One that somebody left open, who is gone, is closed first."""
    try:
        await client.begin_update()
    except UpdateRefused as refusal:
        if "already open" not in str(refusal):
            raise
        await client.end_update()
        await client.begin_update()
    try:
        yield
    except (UpdateRefused, ServerRefused):
        await client.end_update()
        raise
    await client.end_update()


def check_one_replica(way: str, server: ServerInfo) -> None:
    if server.dp_size > 1:
        raise UnusableInput(
            f'sglang.weights = "{way}" does not work with sglang.data_parallel = {server.dp_size}: SGLang takes such '
            'weights with one replica alone; set sglang.weights = "disk", or sglang.data_parallel = 1'
        )


def version_of(number: int, buckets: Sequence[object], weights: WeightsPublished) -> str | None:
    """With the last bucket the server has the version; before it has none of that number."""
    return str(weights.version) if number == len(buckets) - 1 else None
