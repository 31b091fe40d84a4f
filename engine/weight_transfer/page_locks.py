"""Locks the pages of mapped slots, so that a GPU copies them asynchronously and at the full rate of its link.

The memory of a mapping is registered only once, because registering takes about as long as a copy.
"""

import weakref
from contextlib import suppress
from mmap import mmap
from typing import Any, Protocol

import numpy as np
import structlog
import torch

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices of the process


class PageLocker(Protocol):
    def register(self, address: int, num_bytes: int) -> bool:
        """Lock the pages; False if the memory stays pageable."""
        ...

    def unregister(self, address: int) -> None: ...


class CudaPageLocker:
    """Locks pages for a GPU. A failure is logged: copies of pageable memory are slower, but correct."""

    def __init__(self, device: torch.device) -> None:
        """`device`: the process's own; another device would get a CUDA context, which takes memory."""
        self._device = device

    def register(self, address: int, num_bytes: int) -> bool:
        with torch.cuda.device(self._device):
            error = _get_cudart().cudaHostRegister(address, num_bytes, _PORTABLE)
            return self._has_succeeded(error, "weights.pages_not_locked", bytes=num_bytes)

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            error = _get_cudart().cudaHostUnregister(address)
            self._has_succeeded(error, "weights.pages_not_unlocked")

    def _has_succeeded(self, error: Any, event: str, **details: int) -> bool:
        """Return whether a call succeeded; log an error's name and clear the error. `error`: torch's cudaError."""
        if int(error) == 0:
            return True
        with suppress(RuntimeError):  # this kernel launch reports the error again, and clears the error
            torch.zeros(1, device=self._device)
        cause = str(_get_cudart().cudaGetErrorString(error))
        structlog.get_logger().warning(event, cause=cause, cuda_error=int(error), **details)
        return False


def _get_cudart() -> Any:  # torch has no stubs for it
    return torch.cuda.cudart()


def make_page_locker(device: torch.device) -> PageLocker | None:
    """Return a locker of pages, or None for a device that reads main memory itself."""
    return CudaPageLocker(device) if device.type == "cuda" else None


class LockedPages:
    """Locked pages of a mapping, until this object is deleted. The mapping must be shared and writable."""

    def __init__(self, content: mmap, locker: PageLocker | None) -> None:
        self.is_locked = False
        if locker is None:
            return
        address = np.frombuffer(content, np.uint8).ctypes.data
        self.is_locked = locker.register(address, len(content))
        if self.is_locked:
            weakref.finalize(self, _unregister, locker, address, content)


def _unregister(locker: PageLocker, address: int, content: mmap) -> None:
    """Unlock the pages; the argument `content` keeps them mapped until now."""
    locker.unregister(address)
