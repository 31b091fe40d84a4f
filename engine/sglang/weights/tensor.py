"""Weights in the body of requests, bucket by bucket: needs no shared folder and no further connection.

A payload is a pickle of [(name, tensor), ...]; the server's unpickler takes tensors and nothing that could be run.
Every tensor-parallel rank gets all of it, and takes its own part.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping

from torch import Tensor

from bus.messages import WeightsPublished
from engine.sglang.client import SGLangClient
from engine.sglang.protocol import ServerInfo
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.held import check_one_replica, held, opened, version_of
from engine.sglang.weights.published import PublishedLayout, buckets


class TensorWeights:
    def __init__(self, layout: PublishedLayout, checksums: Checksums, bucket_bytes: int) -> None:
        self._layout = layout
        self._checksums = checksums
        self._bucket_bytes = bucket_bytes

    def check(self, server: ServerInfo) -> None:
        check_one_replica("tensor", server)

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        server = await client.server_info()
        self.check(server)
        parameters = await asyncio.to_thread(self._layout.read, weights)
        parts = list(buckets(parameters, self._bucket_bytes))
        async with held(client, weights, self._checksums) as loading, opened(client):
            for number, part in enumerate(parts):
                payload = await asyncio.to_thread(_pickled, part)
                version = version_of(number, parts, weights)
                await client.update_from_tensor(
                    [payload] * server.tp_size, version, load_format=None, flush_cache=False
                )
                loading.begun = True

    async def close(self) -> None:
        """Nothing is open between two updates."""


def _pickled(part: Mapping[str, Tensor]) -> bytes:
    return pickle.dumps(list(part.items()), protocol=4)
