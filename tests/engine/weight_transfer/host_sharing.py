"""A replacement for a GPU's memory: files that other processes or objects map by their path."""

import mmap
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asterism.engine.weight_transfer.memory_sharing import SharedBuffer, SharingFailed


class HostSharing:
    kind = "file"

    def __init__(self, folder: Path, device_id: str = "memory", *, fails: bool = False) -> None:
        self._folder, self.device_id, self._fails = folder, device_id, fails
        self.num_allocated = self.num_opened = self.num_mapped = 0

    def allocate(self, num_bytes: int) -> SharedBuffer:
        if self._fails:
            raise SharingFailed("out of memory")
        self.num_allocated += 1
        path = self._folder / f"memory_{self.num_allocated}"
        path.write_bytes(bytes(num_bytes))
        return SharedBuffer(_view(_map(path)), str(path).encode())

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        if self._fails:
            raise SharingFailed("the handle cannot be opened")
        content = _map(Path(handle.decode()))
        assert len(content) == num_bytes
        self.num_opened += 1
        self.num_mapped += 1
        weakref.finalize(content, self._count_unmapped)
        return _view(content)

    def _count_unmapped(self) -> None:
        self.num_mapped -= 1


def _map(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _view(content: mmap.mmap) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8))
