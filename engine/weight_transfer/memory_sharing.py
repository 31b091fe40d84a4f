"""Shares a device's memory with other processes of the machine, which map the memory by a handle (CUDA IPC).

Tests implement MemorySharing with files in shared memory instead of a GPU's memory.
"""

from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor


class SharingFailed(Exception):
    """The memory cannot be shared or mapped. `str(error)` is the cause."""


class SharedBuffer(NamedTuple):
    body: Tensor  # uint8 [num_bytes]; the memory is shared as long as this tensor lives
    handle: bytes


class MemorySharing(Protocol):
    @property
    def kind(self) -> str:
        """Return the name of the kind of handles."""
        ...

    @property
    def device_id(self) -> str:
        """Return the device's name, which is unique on the machine and equal in all of its processes."""
        ...

    def allocate(self, num_bytes: int) -> SharedBuffer:
        """Allocate shared memory. Raises SharingFailed."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        """Map the memory of another process, uint8 [num_bytes], as long as the tensor lives. Raises SharingFailed."""
        ...


class _CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """A handle: the values that torch.UntypedStorage._share_cuda_ returns after the device, for _new_shared_cuda."""

    memory: bytes
    num_bytes: int
    offset: int  # offset in the allocation, which can hold other tensors
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    needs_event: bool


class CudaSharing:
    """Shares memory of a GPU. A process cannot open its own handles."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device_id(self) -> str:
        """Return the UUID of the GPU, which is independent of CUDA_VISIBLE_DEVICES."""
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def allocate(self, num_bytes: int) -> SharedBuffer:
        try:
            body = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            storage: Any = body.untyped_storage()
            _, *fields = storage._share_cuda_()
        except RuntimeError as error:  # includes torch.OutOfMemoryError
            raise SharingFailed(str(error).partition("\n")[0]) from error
        return SharedBuffer(body, msgspec.msgpack.encode(fields))

    def open(self, handle: bytes, num_bytes: int) -> Tensor:
        fields = msgspec.structs.astuple(msgspec.msgpack.decode(handle, type=_CudaHandle))
        storages: Any = torch.UntypedStorage
        try:
            storage = storages._new_shared_cuda(self._device.index or 0, *fields)
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            return empty.set_(storage, 0, (num_bytes,), (1,))
        except RuntimeError as error:
            raise SharingFailed(str(error).partition("\n")[0]) from error
