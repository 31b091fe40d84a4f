"""Sends new weights in a folder on the server's machine; supports data parallelism.

All servers of a node read one folder, which the first engine that needs the version writes (node_folder.py).
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.weights import TransportParts, build_extra_key
from asterism.engine.sglang.weights.node_folder import NodeFolders
from asterism.engine.sglang.weights.transports import (
    Bucket,
    copy_tensors,
    generation_paused,
    open_parameters,
    split_into_buckets,
)

_FILE_BYTES = 256 * 2**20  # limit of one file of the folder, unless it has a single parameter


class DiskTransport:
    """A transport by files. After an update, the server reports the version's folder as its model path."""

    def __init__(self, parts: TransportParts) -> None:
        self._parts, self._folders = parts, NodeFolders(parts.node_folder)

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        async with (
            open_parameters(weights, self._parts.layout) as parameters,
            self._holding(weights, parameters) as folder,
            generation_paused(client, weights, parameters, self._parts.checksums),
        ):
            await client.update_from_disk(folder, str(weights.version))

    async def close(self) -> None:
        """Do nothing: no file stays open between updates, and the launcher removes folders of killed engines."""

    @asynccontextmanager
    async def _holding(self, weights: WeightsPublished, parameters: Bucket) -> AsyncGenerator[Path]:
        """Yield the folder of these weights, which no engine removes inside the context. Raises WeightsRefused."""
        stop = threading.Event()
        acquiring = asyncio.ensure_future(asyncio.to_thread(self._acquire, weights, parameters, stop))
        try:
            yield await asyncio.shield(acquiring)
        finally:
            stop.set()
            await asyncio.wait((acquiring,))
            acquiring.exception()  # asyncio logs an exception that is never retrieved
            await asyncio.to_thread(self._folders.release)

    def _acquire(self, weights: WeightsPublished, parameters: Bucket, stop: threading.Event) -> Path:
        """Acquire the folder in a thread; block until it is complete or `stop` is set."""
        try:
            folder = self._folders.acquire(
                build_extra_key(weights), lambda part: _write_files(part, parameters, stop), stop
            )
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"weights cannot be written to {self._parts.node_folder}: {error}") from error
        if folder is None:
            raise WeightsRefused(f"the update to version {weights.version} was cancelled")
        return folder


def _write_files(folder: Path, parameters: Bucket, stop: threading.Event) -> None:
    """Write one file per bucket: the server reads all files of the folder."""
    for number, bucket in enumerate(split_into_buckets(parameters, _FILE_BYTES)):
        if stop.is_set():
            raise WeightsRefused("the update was cancelled")
        save_file(copy_tensors(bucket), folder / f"model-{number:05d}.safetensors", {"format": "pt"})
