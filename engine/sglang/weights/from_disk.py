"""Transfers weights through a folder on the server's machine; supports data parallelism.

After an update, the server reports this folder as its model path.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from bus.messages import WeightsPublished
from engine.contract import WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.http_api import ServerInfo
from engine.sglang.weights.buckets import PublishedLayout
from engine.sglang.weights.checksums import ChecksumRegistry
from engine.sglang.weights.update_window import generation_paused


class DiskTransport:
    def __init__(self, layout: PublishedLayout, checksums: ChecksumRegistry, folder: Path) -> None:
        """`folder`: used only by this engine and only during an update; should be in memory."""
        self._layout = layout
        self._checksums = checksums
        self._folder = folder

    def check(self, server: ServerInfo) -> None:
        """Every server supports this transport."""

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        try:
            await asyncio.to_thread(self._write, weights)
            async with generation_paused(client, weights, self._checksums):
                await client.weights.update_from_disk(self._folder, str(weights.version), flush_cache=False)
        finally:
            await self.close()

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _write(self, weights: WeightsPublished) -> None:
        parameters = self._layout.read(weights)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(parameters, self._folder / "model.safetensors", metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise WeightsRefused(f"weights cannot be written to {self._folder}: {error}") from error
