"""Publishes the weights of all ranks: each rank writes its own rows into a slot, in the dtype of the engines.

No rank gathers a whole parameter. The slots are in the shared memory of the leading rank's machine, where its ranks
write directly. If the first copy of the model spans machines, its ranks on other machines send their rows to the rank
with the same local number, in buckets of BUCKET_BYTES. Other copies of the model send nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.learner.distributed import RankGroup, gather_full, get_local, wait_at_barrier
from asterism.engine.model.hf_checkpoint import find_shard_rows
from asterism.engine.model.lora_linear import list_adapters, merge_rows
from asterism.engine.weight_transfer.chunk_digests import count_device_threads
from asterism.engine.weight_transfer.device_weights import DeviceWeightsWriter
from asterism.engine.weight_transfer.memory_sharing import MemorySharing
from asterism.engine.weight_transfer.page_locks import make_page_locker
from asterism.engine.weight_transfer.slot_writer import SlotWriter
from asterism.engine.weight_transfer.weight_layout import get_layout

BUCKET_BYTES = 64 * 2**20  # size of the float32 values that are converted or sent at once


class AdapterMerger:
    """A merger of adapters into this rank's rows of the weights: W + (alpha / r) B A.

    A rank has the same rows of W and of B. The matrices A are small: each rank gathers all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model` can have adapters, and is whole or sharded over the ranks."""
        self._layers = {f"{name}.weight": layer for name, layer in list_adapters(model).items()}
        self._whole_a: dict[str, Tensor] = {}

    def gather(self) -> None:
        """Gather the matrices A. Every rank calls it before it merges the current weights."""
        self._whole_a = {name: gather_full(layer.lora_A.weight.detach()) for name, layer in self._layers.items()}

    def merge(self, name: str, block: Tensor, first_row: int) -> Tensor:
        """Merge `block`, rows of weights `name` from this rank's `first_row` on. Without an adapter, return `block`."""
        layer = self._layers.get(name)
        if layer is None:
            return block
        rows_b = get_local(layer.lora_B.weight)[first_row : first_row + len(block)]
        return merge_rows(block, rows_b, self._whole_a[name], layer.options.scale)


class WeightPublisher:
    def __init__(
        self,
        folder: Path,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        num_slots: int = 2,
        ranks: RankGroup | None = None,
        merger: AdapterMerger | None = None,
        *,
        first_slot: int = 0,
        prefix_bytes: int = 0,
        sharing: MemorySharing | None = None,
    ) -> None:
        """`parameters` are whole, or sharded over the ranks. `dtype`: dtype of the published weights.

        `prefix_bytes`: size of the prefix that `publish` writes before the parameters. `sharing`: shares GPU memory of
        a single rank with an engine. Several ranks ignore it, because each has only rows; engines then load the slot.
        """
        self._ranks = ranks or RankGroup()
        self._parameters = parameters
        self._dtype = dtype
        self._merger = merger
        self._layout = layout = get_layout(parameters, dtype, prefix_bytes)
        self.num_bytes = layout.num_bytes  # bytes of a publication
        local_ranks = min(self._ranks.local_world_size, self._ranks.world_size)
        threads = count_device_threads(self._device, local_ranks)
        self._slots = SlotWriter(folder, layout, num_slots, first_slot, make_page_locker(self._device), threads)
        has_buffer = sharing is not None and self._ranks.world_size == 1
        self._on_device = DeviceWeightsWriter(folder, self.num_bytes, sharing) if sharing and has_buffer else None

    def publish(self, version: int, prefix: bytes = b"") -> WeightsPublished | None:
        """Publish a version. Every rank calls it; the leading rank passes the prefix and returns the engines' message.

        Raises DiskError on the leading rank if the memory is full.
        """
        ranks = self._ranks
        if self._merger is not None:
            self._merger.gather()
        if ranks.is_leader:
            self._slots.prepare(version, prefix)
        wait_at_barrier(ranks)
        if ranks.world_size == 1:
            return self._publish_alone(version)
        if ranks.node == 0:
            self._write_rows(version)
        elif self._is_in_first_copy(ranks.rank):
            self._send_rows()
        wait_at_barrier(ranks)
        if ranks.node == 0:
            self._slots.digest(version, ranks.rank, min(ranks.local_world_size, ranks.world_size))
        wait_at_barrier(ranks)
        return self._slots.seal(version) if ranks.is_leader else None

    def close(self) -> None:
        """Remove the published weights."""
        if self._ranks.is_leader:
            self._slots.close()
        if self._on_device is not None:
            self._on_device.close()

    def _publish_alone(self, version: int) -> WeightsPublished:
        """Publish with one rank. Threads digest the complete chunks; only these threads wait for a GPU."""
        views = self._slots.open(version)
        body = None if self._on_device is None else self._on_device.begin()
        device = self._device if body is None else body.device  # the device that writes the slot
        written_first = views if body is None else self._layout.view(body)
        with self._slots.start_digests(version) as digests:
            for name in self._layout.list_names():
                for block, source in zip(_iter_blocks(written_first[name]), self._iter_own_blocks(name), strict=True):
                    block.copy_(source, non_blocking=True)
                if body is not None:
                    views[name].copy_(written_first[name], non_blocking=True)
                digests.advance(self._layout.find_end(name), _record_copies(device))
        published = self._slots.seal(version)
        if self._on_device is not None:
            self._on_device.finish(published)
        return published

    @property
    def _device(self) -> torch.device:
        """The device of the parameters."""
        return next((get_local(parameter).device for parameter in self._parameters.values()), torch.device("cpu"))

    def _write_rows(self, version: int) -> None:
        """Write the rows of this rank, and of the ranks with its local number on other machines."""
        slot, ranks = self._slots.open(version), self._ranks
        for rank in range(ranks.rank, ranks.world_size, ranks.local_world_size):
            if not self._is_in_first_copy(rank):
                continue
            for name, parameter in self._parameters.items():
                rows = slot[name][self._find_rows(parameter, rank)]
                if rank == ranks.rank:
                    for block, source in zip(_iter_blocks(rows), self._iter_own_blocks(name), strict=True):
                        block.copy_(source, non_blocking=True)
                else:
                    for block in _iter_blocks(rows):
                        received = torch.empty_like(block, device=ranks.device)
                        dist.recv(received.view(torch.uint8), rank, ranks.tensor_group)
                        block.copy_(received, non_blocking=True)
        if (wait := _record_copies(ranks.device)) is not None:
            wait()

    def _send_rows(self) -> None:
        ranks = self._ranks
        for name in self._parameters:
            for block in self._iter_own_blocks(name):
                converted = block.to(ranks.device, self._dtype).contiguous()
                dist.send(converted.view(torch.uint8), ranks.rank % ranks.local_world_size, ranks.tensor_group)

    def _iter_own_blocks(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of this rank in blocks, with the adapter merged."""
        first_row = 0
        for block in _iter_blocks(get_local(self._parameters[name])):
            yield block if self._merger is None else self._merger.merge(name, block, first_row)
            first_row += len(block)

    def _is_in_first_copy(self, rank: int) -> bool:
        return self._ranks.find_data_rank(rank) < self._ranks.dims.dp_shard

    def _find_rows(self, parameter: Tensor, rank: int) -> slice:
        """Return the rows of the whole parameter that a rank of the first copy has."""
        if not isinstance(parameter, DTensor):
            return slice(None)
        return find_shard_rows(len(parameter), self._ranks.find_data_rank(rank), self._ranks.dims.dp_shard)


def _iter_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Split rows into blocks of at most BUCKET_BYTES of float32 values, and at least one row."""
    return iter(rows.split(max(1, BUCKET_BYTES // (4 * max(1, rows[:1].numel()))))) if rows.numel() else iter(())


def _record_copies(device: torch.device) -> Callable[[], None] | None:
    """Return a function that waits until the GPU has finished all copies so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize
