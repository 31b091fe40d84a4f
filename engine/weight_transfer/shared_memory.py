"""Passes new weights to the generators of a machine through shared memory, in slots that are used in turn.

engine.weight_transfer.slot_file defines a slot's file. Its header is invalid while the parameters are written. The
message carries the digest too. A reader copies the parameters first and then checks the copy, so that it detects a slot
that was overwritten at any time.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bus.messages import WeightsPublished
from configs.atomic_write import raising_disk_errors
from engine.contract import WeightsRefused
from engine.weight_transfer.slot_file import (
    HEADER,
    HEADER_BYTES,
    UNFINISHED_VERSION,
    SlotHeader,
    build_header,
    get_slot_path,
    parse_header,
)

_NO_DIGEST = "00" * 16


class WeightsPublisher:
    """Writes each version into slot `version % num_slots`: earlier versions stay readable while generators load them.

    `folder` is in shared memory and belongs to the run (RunFolder.shared_memory); the launcher removes it.
    """

    def __init__(self, folder: Path, num_slots: int = 2) -> None:
        self._folder = folder
        self._slots: list[mmap.mmap | None] = [None] * num_slots
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> WeightsPublished:
        """Write all parameters; returns the message for the generators. Raises DiskError if the memory is full."""
        num_bytes = 4 * sum(parameter.numel() for parameter in parameters.values())
        number = version % len(self._slots)
        slot = self._open_slot(number, HEADER_BYTES + num_bytes)
        slot[: HEADER.size] = SlotHeader(UNFINISHED_VERSION, num_bytes, _NO_DIGEST).pack()
        body = np.frombuffer(slot, np.float32, num_bytes // 4, HEADER_BYTES)
        for parameter, part in _iter_parts(body, parameters):
            part.copy_(parameter.detach())
        published = WeightsPublished(
            version, str(get_slot_path(self._folder, number)), num_bytes, _compute_digest(body)
        )
        slot[: HEADER.size] = build_header(published).pack()
        return published

    def close(self) -> None:
        """Remove the files. Processes with an open file keep its contents."""
        for number in range(len(self._slots)):
            self._slots[number] = None
            get_slot_path(self._folder, number).unlink(missing_ok=True)

    def _open_slot(self, number: int, size: int) -> mmap.mmap:
        slot = self._slots[number]
        if slot is None or len(slot) != size:
            path = get_slot_path(self._folder, number)
            with raising_disk_errors(path), path.open("a+b") as file:
                file.truncate(size)
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, instead of a SIGBUS later
                slot = mmap.mmap(file.fileno(), size)
            self._slots[number] = slot
        return slot


def load_published(published: WeightsPublished, parameters: Mapping[str, Tensor]) -> None:
    """Copy the published weights into `parameters`, or leave them unchanged and raise WeightsRefused."""
    expected = 4 * sum(parameter.numel() for parameter in parameters.values())
    if published.num_bytes != expected:
        raise WeightsRefused(f"weights have {published.num_bytes} bytes, but the model needs {expected}")
    body = _read_slot(published)
    if _compute_digest(body) != published.digest:
        raise WeightsRefused(f"weights of version {published.version} were overwritten or are damaged")
    with torch.no_grad():
        for parameter, part in _iter_parts(body, parameters):
            parameter.copy_(part)


def _read_slot(published: WeightsPublished) -> NDArray[np.float32]:
    """A private copy of the parameters' bytes."""
    try:
        content = np.fromfile(published.path, np.uint8)
    except OSError as error:
        raise WeightsRefused(f"weights cannot be read: {error.strerror}") from error
    if len(content) != HEADER_BYTES + published.num_bytes:
        raise WeightsRefused(f"the file of the weights has {len(content)} bytes")
    header = parse_header(content.data)
    if header is None or (header.version, header.num_bytes) != (published.version, published.num_bytes):
        held = "no weights" if header is None else f"version {header.version}"
        raise WeightsRefused(f"the slot holds {held}, not {published.version}")
    return content[HEADER_BYTES:].view(np.float32)


def _iter_parts(body: NDArray[np.float32], parameters: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter in the order of names, and its part of `body` in its shape."""
    flat, start = torch.from_numpy(body), 0
    for name in sorted(parameters):
        parameter = parameters[name]
        yield parameter, flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


def _compute_digest(body: NDArray[np.float32]) -> str:
    return hashlib.blake2b(body.data.cast("B"), digest_size=16).hexdigest()
