"""Pickles tensors as handles of their memory instead of their values, as SGLang's ranks read them.

CUDA IPC shares a GPU's memory, and a file of torch's shared memory shares main memory. torch counts the references: it
uses the memory again only after the other process has released it, which waits for its kernels.
"""

import io
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

_DEVICE_ARGUMENT = 6  # position of the device among the arguments of torch's rebuild_cuda_tensor


def pickle_handles(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a pickle of [(name, tensor), ...] for one process; each further process needs a pickle of its own.

    `tensors`: views of memory that no other process writes until it has released them. Raises RuntimeError if the
    memory cannot be shared.
    """
    content = io.BytesIO()
    pickler = ForkingPickler(content)
    pickler.dispatch_table[Tensor] = _reduce_tensor
    pickler.dispatch_table[torch.UntypedStorage] = _reduce_storage
    pickler.dump(list(tensors.items()))
    return content.getvalue()


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Name a GPU by its UUID, which SGLang accepts (utils/patch_torch.py): processes number GPUs differently."""
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if tensor.device.type != "cuda":
        return rebuild, arguments
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


def _reduce_storage(storage: Any) -> tuple[Any, ...]:
    """Share main memory as torch's strategy "file_system" does, and keep the strategy of this process."""
    metadata = storage._share_filename_cpu_()
    storage._shared_incref()  # the other process takes this reference
    return reductions.rebuild_storage_filename, (torch.UntypedStorage, *metadata)
