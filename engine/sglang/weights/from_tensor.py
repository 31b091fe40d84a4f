"""Transfers weights in request bodies, in buckets: needs no shared folder or other connection.

A payload is a pickle of [(name, tensor), ...]; the server's unpickler accepts only tensors. Every
tensor-parallel rank receives the whole payload and uses its shard.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping

from torch import Tensor

from bus.messages import WeightsPublished
from engine.sglang.client import SGLangClient
from engine.sglang.http_api import ServerInfo
from engine.sglang.weights.buckets import PublishedLayout, split_into_buckets
from engine.sglang.weights.checksums import ChecksumRegistry
from engine.sglang.weights.update_window import check_single_replica, generation_paused, get_bucket_version, update_open


class TensorTransport:
    def __init__(self, layout: PublishedLayout, checksums: ChecksumRegistry, bucket_bytes: int) -> None:
        self._layout = layout
        self._checksums = checksums
        self._bucket_bytes = bucket_bytes

    def check(self, server: ServerInfo) -> None:
        check_single_replica("tensor", server)

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        server = await client.get_server_info()
        self.check(server)
        parameters = await asyncio.to_thread(self._layout.read, weights)
        buckets = list(split_into_buckets(parameters, self._bucket_bytes))
        async with generation_paused(client, weights, self._checksums) as progress, update_open(client):
            for number, bucket in enumerate(buckets):
                payload = await asyncio.to_thread(_pickle_bucket, bucket)
                version = get_bucket_version(number, buckets, weights)
                await client.weights.update_from_tensor(
                    [payload] * server.tp_size, version, load_format=None, flush_cache=False
                )
                progress.any_loaded = True

    async def close(self) -> None:
        """Nothing stays open between updates."""


def _pickle_bucket(bucket: Mapping[str, Tensor]) -> bytes:
    return pickle.dumps(list(bucket.items()), protocol=4)
