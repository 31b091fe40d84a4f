"""How new weights reach the generators of a machine: through shared memory, in two slots used by turns.

A slot's file is what engine.weight_slots says. The header is made invalid before the parameters are written and valid
after; the digest travels in the message too. A reader copies first and checks what it copied, so that a slot that was
overwritten meanwhile is noticed, whatever the timing.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bus.messages import WeightsPublished
from configs.disk import writing
from engine.contract import WeightsRefused
from engine.weight_slots import HEADER, HEADER_BYTES, UNFINISHED, SlotHeader, header_of, read_header, slot_path

_NO_DIGEST = "00" * 16


class WeightsPublisher:
    """Writes each version into slot `version % slots`: the one before it stays readable while a generator loads it.

    `folder` lies in memory and belongs to the run (RunFolder.shared_memory); the launcher sweeps it.
    """

    def __init__(self, folder: Path, slots: int = 2) -> None:
        self._folder = folder
        self._slots: list[mmap.mmap | None] = [None] * slots
        folder.mkdir(parents=True, exist_ok=True)

    def publish(self, version: int, parameters: Mapping[str, Tensor]) -> WeightsPublished:
        """Write all parameters; returns what the generators have to be told. Raises DiskRefused if the memory is full."""
        num_bytes = 4 * sum(parameter.numel() for parameter in parameters.values())
        number = version % len(self._slots)
        slot = self._slot(number, HEADER_BYTES + num_bytes)
        slot[: HEADER.size] = SlotHeader(UNFINISHED, num_bytes, _NO_DIGEST).packed()
        body = np.frombuffer(slot, np.float32, num_bytes // 4, HEADER_BYTES)
        _flatten(parameters, body)
        published = WeightsPublished(version, str(slot_path(self._folder, number)), num_bytes, _digest(body))
        slot[: HEADER.size] = header_of(published).packed()
        return published

    def close(self) -> None:
        """Remove the files. Who has one open keeps what it holds."""
        for number in range(len(self._slots)):
            self._slots[number] = None
            slot_path(self._folder, number).unlink(missing_ok=True)

    def _slot(self, number: int, size: int) -> mmap.mmap:
        slot = self._slots[number]
        if slot is None or len(slot) != size:
            path = slot_path(self._folder, number)
            with writing(path), path.open("a+b") as file:
                file.truncate(size)
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error here, not a SIGBUS later
                slot = mmap.mmap(file.fileno(), size)
            self._slots[number] = slot
        return slot


def load_published(published: WeightsPublished, parameters: Mapping[str, Tensor]) -> None:
    """Copy the published weights into `parameters` in place, or leave them as they are and raise WeightsRefused."""
    expected = 4 * sum(parameter.numel() for parameter in parameters.values())
    if published.num_bytes != expected:
        raise WeightsRefused(f"weights have {published.num_bytes} bytes, the model takes {expected}")
    body = _read(published)
    if _digest(body) != published.digest:
        raise WeightsRefused(f"weights of version {published.version} were overwritten, or are damaged")
    _unflatten(body, parameters)


def _read(published: WeightsPublished) -> NDArray[np.float32]:
    """A private copy of the parameters' bytes."""
    try:
        content = np.fromfile(published.path, np.uint8)
    except OSError as error:
        raise WeightsRefused(f"weights cannot be read: {error.strerror}") from error
    if len(content) != HEADER_BYTES + published.num_bytes:
        raise WeightsRefused(f"the file of the weights has {len(content)} bytes")
    header = read_header(content.data)
    if header is None or (header.version, header.num_bytes) != (published.version, published.num_bytes):
        held = "no weights" if header is None else f"version {header.version}"
        raise WeightsRefused(f"the slot holds {held}, not {published.version}")
    return content[HEADER_BYTES:].view(np.float32)


def _flatten(parameters: Mapping[str, Tensor], body: NDArray[np.float32]) -> None:
    flat = torch.from_numpy(body)
    start = 0
    for name in sorted(parameters):
        parameter = parameters[name].detach()
        flat[start : start + parameter.numel()].view(parameter.shape).copy_(parameter)
        start += parameter.numel()


def _unflatten(body: NDArray[np.float32], parameters: Mapping[str, Tensor]) -> None:
    flat = torch.from_numpy(body)
    start = 0
    with torch.no_grad():
        for name in sorted(parameters):
            parameter = parameters[name]
            parameter.copy_(flat[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()


def _digest(body: NDArray[np.float32]) -> str:
    return hashlib.blake2b(body.data.cast("B"), digest_size=16).hexdigest()
