"""Weights through a folder that the server reads: also with data parallelism, and only on the server's machine.

After an update the server names that folder as its model's path.
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
from engine.sglang.protocol import ServerInfo
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.held import held
from engine.sglang.weights.published import PublishedLayout


class DiskWeights:
    def __init__(self, layout: PublishedLayout, checksums: Checksums, folder: Path) -> None:
        """`folder` is this engine's alone; it should lie in memory, and is there during an update only."""
        self._layout = layout
        self._checksums = checksums
        self._folder = folder

    def check(self, server: ServerInfo) -> None:
        """Any server takes them."""

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        try:
            await asyncio.to_thread(self._write, weights)
            async with held(client, weights, self._checksums):
                await client.update_from_disk(self._folder, str(weights.version), flush_cache=False)
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
