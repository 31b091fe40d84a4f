"""Sends new weights in the memory of the server's device: the request bodies hold only handles of this memory.

The transport copies each bucket once, from the page-locked slot to the device. The server's ranks map the bucket and
load it. With tensor parallelism the bucket is on the first GPU of the server, and the other ranks copy from that GPU.
On a CPU, torch's shared memory replaces CUDA IPC. On CUDA this has never run on a GPU.
"""

import asyncio
from collections.abc import Mapping

import structlog
import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import UpdateRefused
from asterism.engine.sglang.weights import TransportParts
from asterism.engine.sglang.weights.tensor_handles import pickle_handles
from asterism.engine.sglang.weights.transports import Bucket, open_parameters, update_in_buckets
from asterism.engine.weight_transfer.chunk_digests import count_threads
from asterism.engine.weight_transfer.page_locks import make_page_locker
from asterism.engine.weight_transfer.shared_memory import wait_for_copies
from asterism.engine.weight_transfer.slot_mappings import SlotMappings
from asterism.engine.weight_transfer.weight_layout import get_layout

_ENGINES_PER_NODE = 4  # assumed number of engines that verify a version at the same time


class IpcTransport:
    def __init__(self, parts: TransportParts) -> None:
        self._parts = parts
        self._mappings = SlotMappings(make_page_locker(parts.device), count_threads(_ENGINES_PER_NODE))

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        server = await client.get_server_info()

        async def send(bucket: Bucket, version: str | None) -> None:
            staged = await asyncio.to_thread(_stage, bucket, self._parts.device)
            payloads = [await asyncio.to_thread(_pickle_staged, staged) for _ in range(server.tp_size)]
            await client.update_from_tensor(payloads, version)

        try:
            async with open_parameters(weights, self._parts.layout, self._mappings) as parameters:
                await update_in_buckets(
                    client, weights, parameters, self._parts.checksums, self._parts.bucket_bytes, send
                )
        finally:
            if self._parts.device.type == "cuda":
                await asyncio.to_thread(_free_buckets, self._parts.device)

    async def close(self) -> None:
        """Do nothing: only the mappings of slots stay open between updates."""


def _stage(bucket: Bucket, device: torch.device) -> dict[str, Tensor]:
    """Copy the bucket into new memory. Raises UpdateRefused if the device has too little memory."""
    dtype = next(iter(bucket.values())).dtype
    layout = get_layout(bucket, dtype)
    try:
        staged = layout.view(torch.empty(layout.num_bytes, dtype=torch.uint8, device=device))
        for name, tensor in bucket.items():
            staged[name].copy_(tensor, non_blocking=True)
        wait_for_copies(staged)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        raise UpdateRefused(f"a part of the weights cannot be copied to {device}: {error}") from error
    return staged


def _pickle_staged(staged: Mapping[str, Tensor]) -> bytes:
    try:
        return pickle_handles(staged)
    except RuntimeError as error:
        raise UpdateRefused(f"the memory of the weights cannot be shared: {error}") from error


def _free_buckets(device: torch.device) -> None:
    """Return memory that the server has released to the GPU, which the learner and the server share.

    An error is only logged, so that it does not hide the error of the update. The next update retries.
    """
    try:
        with torch.cuda.device(device):
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
    except RuntimeError as error:
        structlog.get_logger().warning("weights.buckets_not_freed", device=str(device), cause=str(error))
