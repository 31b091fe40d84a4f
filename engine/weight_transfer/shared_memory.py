"""Reads published weights from a slot in shared memory, which the reader maps and locks instead of copying it."""

import fcntl
import mmap
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from bus.messages import WeightsPublished
from engine.contract import WeightsRefused
from engine.weight_transfer.slot_file import (
    compute_file_bytes,
    digest_table,
    find_damaged_chunk,
    get_chunk_table,
    parse_header,
)
from engine.weight_transfer.weight_layout import WeightLayout, get_layout, view_body

_TRANSPOSED_ROWS = 64  # of a matrix that are transposed at once, in the processor's cache
_MADV_POPULATE_READ = 22  # of Linux 5.14; Python has no name for it


@contextmanager
def open_published(published: WeightsPublished, layout: WeightLayout) -> Generator[dict[str, Tensor]]:
    """Views of the published parameters, verified; valid and unchanged inside the context.

    Raises WeightsRefused if the slot does not hold these weights.
    """
    with open_body(published, layout) as body:
        yield layout.view(body)


@contextmanager
def open_body(published: WeightsPublished, layout: WeightLayout) -> Generator[Tensor]:
    """As open_published: the prefix and the parameters, uint8 [num_bytes]."""
    if published.num_bytes != layout.num_bytes:
        raise WeightsRefused(f"weights have {published.num_bytes} bytes, but the model needs {layout.num_bytes}")
    with _opened(Path(published.path)) as file, _share_locked(file):
        yield view_body(_map_verified(file, published), layout.num_bytes)


def load_published(published: WeightsPublished, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Copy the published weights, which have `dtype`, into `parameters`, or leave them unchanged and raise
    WeightsRefused."""
    with open_published(published, get_layout(parameters, dtype)) as views, torch.no_grad():
        for name, parameter in parameters.items():
            copy_into(parameter, views[name])


@contextmanager
def _opened(path: Path) -> Generator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsRefused(f"weights cannot be read: {error.strerror}") from error
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _share_locked(file: int) -> Generator[None]:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WeightsRefused("the slot is being overwritten") from None
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # before the mapping ends, which keeps the file open


def _map_verified(file: int, published: WeightsPublished) -> mmap.mmap:
    size = os.fstat(file).st_size
    if size != compute_file_bytes(published.num_bytes):
        raise WeightsRefused(f"the file of the weights has {size} bytes")
    content = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)  # writable for torch, but never written
    with suppress(OSError):
        content.madvise(_MADV_POPULATE_READ)  # one call is cheaper than a page fault per 64 KiB
    header, view = parse_header(content[:64]), memoryview(content)
    if header is None or (header.version, header.num_bytes) != (published.version, published.num_bytes):
        held = "no weights" if header is None else f"version {header.version}"
        raise WeightsRefused(f"the slot holds {held}, not {published.version}")
    if digest_table(get_chunk_table(view, published.num_bytes), published.num_bytes) != published.digest:
        raise WeightsRefused(f"the slot holds other weights of version {published.version}, or is damaged")
    if (number := find_damaged_chunk(view, published.num_bytes)) is not None:
        raise WeightsRefused(f"chunk {number} of the weights of version {published.version} is damaged")
    return content


def copy_into(parameter: Tensor, source: Tensor) -> None:
    """Engines store matrices transposed, which torch copies several times more slowly at once than in blocks."""
    is_transposed = (
        parameter.dim() == 2 and parameter.device.type == "cpu" and parameter.stride(0) < parameter.stride(1)
    )
    if not is_transposed:
        parameter.copy_(source)
        return
    columns = parameter.t()
    for start in range(0, len(source), _TRANSPOSED_ROWS):
        rows = slice(start, start + _TRANSPOSED_ROWS)
        columns[:, rows].copy_(source[rows].t())
