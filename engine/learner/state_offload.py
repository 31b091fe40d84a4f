"""Frees a rank's GPU memory for engines that share the GPU (sglang.colocate), from a publication to the next step.

The allocator's cached memory is always freed. With learner.memory.offload = "between_steps" the weights, the moments of the
optimizer and the weights of the reference model move to page-locked main memory. Gradients exist only during an update.

A tensor then refers to main memory, so that a checkpoint can read it, and its storage on the device has 0 bytes. The
next step fills the same storage again, because other tensors refer to it, such as FSDP's views of the parameters.
"""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.distributed import RankGroup, wait_at_barrier


def list_state(model: nn.Module, optimizers: Iterable[Optimizer], reference: nn.Module | None) -> list[Tensor]:
    """Return the tensors of model, optimizers and reference, each once: the reference can share the model's weights."""
    states = [state.values() for optimizer in optimizers for state in optimizer.state.values()]
    frozen = [] if reference is None else reference.parameters()
    tensors = [*model.parameters(), *chain.from_iterable(states), *frozen]
    return list({id(each): each for each in tensors}.values())


class _MovedTensor(NamedTuple):
    tensor: Tensor  # this rank's part of a parameter or moment, in main memory
    on_device: Tensor  # the part on the device, with 0 bytes of memory


class StateOffload:
    """An offload between steps: all ranks call `release`, then `restore`. Without a shared GPU, both do nothing."""

    def __init__(self, run: RunConfig, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._is_shared = run.sglang.colocate
        self._moves_state = run.learner.memory.offload == "between_steps"
        self._moved: list[_MovedTensor] = []
        self._offload_s = 0.0

    def release(self, collect_state: Callable[[], Iterable[Tensor]]) -> None:
        """Free the memory of all ranks. `collect_state` returns the tensors to move, which no other thread reads."""
        if not self._is_shared:
            return
        with self._measuring("release of the GPU"):
            if self._moves_state:
                self._move_to_host(collect_state())
            if self._ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            wait_at_barrier(self._ranks)

    @torch.no_grad()
    def restore(self) -> None:
        """Move the tensors back. A checkpoint can still read the unchanged copies in main memory."""
        if not self._moved:
            return
        with self._measuring("return to the GPU"):
            for tensor, on_device in self._moved:
                source, target = tensor.untyped_storage(), on_device.untyped_storage()
                target.resize_(source.nbytes())
                _view_bytes(target).copy_(_view_bytes(source), non_blocking=True)
            self._synchronize()
            for tensor, on_device in self._moved:
                tensor.data = on_device
            self._moved.clear()

    def take_metrics(self) -> dict[str, float]:
        """Return `offload_s`: seconds in `release` and `restore` since the last call; empty without a shared GPU."""
        offload_s, self._offload_s = self._offload_s, 0.0
        return {"offload_s": offload_s} if self._is_shared else {}

    @torch.no_grad()
    def _move_to_host(self, tensors: Iterable[Tensor]) -> None:
        device_type = self._ranks.device.type
        local = [_get_local_tensor(each) for each in tensors]
        # AdamW's step counts are always in main memory.
        copies = [(each, _copy_to_host(each)) for each in local if each.device.type == device_type]
        self._synchronize()
        for tensor, on_host in copies:
            self._moved.append(_MovedTensor(tensor, tensor.detach()))
            tensor.data = on_host
        for _, on_device in self._moved:
            on_device.untyped_storage().resize_(0)

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    @contextmanager
    def _measuring(self, operation: str) -> Generator[None]:
        began = time.monotonic()
        with self._ranks.operation(operation):
            yield
        self._offload_s += time.monotonic() - began


def _get_local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's own tensor. For a parameter, `to_local` returns a view: a move would change only this view."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start to copy the whole storage, with FSDP's padding. The copy is complete after a synchronization."""
    source = tensor.untyped_storage()
    copied = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
    copied.copy_(_view_bytes(source), non_blocking=True)
    on_host = torch.empty(0, dtype=tensor.dtype)
    return on_host.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _view_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
