"""Files in place of a GPU's memory: other processes, or other objects of this one, map them by their path."""

import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.weight_transfer.memory_sharing import SharedBuffer, SharingFailed


class HostSharing:
    kind = "file"

    def __init__(self, folder: Path, device_id: str = "memory", *, fails: bool = False) -> None:
        self._folder, self.device_id, self._fails = folder, device_id, fails
        self.num_allocated = self.num_opened = 0

    def allocate(self, num_bytes: int) -> SharedBuffer:
        if self._fails:
            raise SharingFailed("out of memory")
        self.num_allocated += 1
        path = self._folder / f"memory_{self.num_allocated}"
        path.write_bytes(bytes(num_bytes))
        return SharedBuffer(_map(path), str(path).encode())

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        if self._fails:
            raise SharingFailed("the handle cannot be opened")
        self.num_opened += 1
        body = _map(Path(handle.decode()))
        assert body.numel() == num_bytes
        return body


def _map(path: Path) -> Tensor:
    with path.open("r+b") as file:
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8))
