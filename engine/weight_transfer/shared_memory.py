"""Reads published weights from a slot in shared memory, which the reader maps and locks instead of copying it."""

import mmap
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.weight_transfer.chunk_digests import find_damaged_chunk
from asterism.engine.weight_transfer.file_lock import opened, try_lock, unlock
from asterism.engine.weight_transfer.slot_file import compute_file_bytes, digest_table, get_chunk_table, parse_header
from asterism.engine.weight_transfer.slot_mappings import SlotMappings, map_privately
from asterism.engine.weight_transfer.weight_layout import WeightLayout, get_layout, view_body

_TRANSPOSED_ROWS = 64  # rows of a matrix that are transposed at once, in the processor's cache


@contextmanager
def open_published(
    published: WeightsPublished, layout: WeightLayout, mappings: SlotMappings | None = None, *, threads: int = 1
) -> Generator[dict[str, Tensor]]:
    """Yield views of the published parameters, verified; valid and unchanged inside the context.

    `mappings`: mappings of an engine that loads each version. `threads`: number of threads that verify a slot without
    mappings. Raises WeightsRefused if the slot does not hold these weights.
    """
    with open_body(published, layout, mappings, threads=threads) as body:
        yield layout.view(body)


@contextmanager
def open_body(
    published: WeightsPublished, layout: WeightLayout, mappings: SlotMappings | None = None, *, threads: int = 1
) -> Generator[Tensor]:
    """Yield the prefix and the parameters, uint8 [num_bytes]. Arguments and errors are those of open_published."""
    if published.num_bytes != layout.num_bytes:
        raise WeightsRefused(f"weights have {published.num_bytes} bytes, but the model needs {layout.num_bytes}")
    with _opened(Path(published.path)) as file, _share_locked(file):
        size = os.fstat(file).st_size
        if size != compute_file_bytes(published.num_bytes):
            raise WeightsRefused(f"the file of the weights has {size} bytes")
        content = map_privately(file) if mappings is None else mappings.map(Path(published.path), file)
        _verify(content, published, threads if mappings is None else mappings.threads)
        yield view_body(content, layout.num_bytes)


def load_published(
    published: WeightsPublished,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    mappings: SlotMappings | None = None,
) -> None:
    """Copy the published weights, which have `dtype`, into `parameters`, or leave them unchanged and raise
    WeightsRefused. All chunks are verified before the first parameter is written."""
    with open_published(published, get_layout(parameters, dtype), mappings) as views, torch.no_grad():
        for name, parameter in parameters.items():
            copy_into(parameter, views[name])
        wait_for_copies(parameters)


def wait_for_copies(parameters: Mapping[str, Tensor]) -> None:
    """Wait until the GPU has read the slot. Only then can the slot be overwritten."""
    for device in {parameter.device for parameter in parameters.values()}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


@contextmanager
def _opened(path: Path) -> Generator[int]:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(opened(path))
        except OSError as error:
            raise WeightsRefused(f"weights cannot be read: {error.strerror}") from error
        yield file


@contextmanager
def _share_locked(file: int) -> Generator[None]:
    if not try_lock(file, shared=True):
        raise WeightsRefused("the slot is being overwritten")
    try:
        yield
    finally:
        unlock(file)  # unlock here, because the mapping keeps the file open


def _verify(content: mmap.mmap, published: WeightsPublished, threads: int) -> None:
    """Check the header and all digests. Raises WeightsRefused."""
    header, view = parse_header(content[:64]), memoryview(content)
    if header is None or (header.version, header.num_bytes) != (published.version, published.num_bytes):
        held = "no weights" if header is None else f"version {header.version}"
        raise WeightsRefused(f"the slot holds {held}, not {published.version}")
    if digest_table(get_chunk_table(view, published.num_bytes), published.num_bytes) != published.digest:
        raise WeightsRefused(f"the slot holds other weights of version {published.version}, or is damaged")
    if (number := find_damaged_chunk(view, published.num_bytes, threads)) is not None:
        raise WeightsRefused(f"chunk {number} of the weights of version {published.version} is damaged")


def copy_into(parameter: Tensor, source: Tensor) -> None:
    """Copy a parameter without waiting for a GPU.

    Engines store matrices transposed; on a CPU, torch copies such a matrix several times faster in blocks.
    """
    is_transposed = (
        parameter.dim() == 2 and parameter.device.type == "cpu" and parameter.stride(0) < parameter.stride(1)
    )
    if not is_transposed:
        parameter.copy_(source, non_blocking=True)
        return
    columns = parameter.t()
    for start in range(0, len(source), _TRANSPOSED_ROWS):
        rows = slice(start, start + _TRANSPOSED_ROWS)
        columns[:, rows].copy_(source[rows].t())
