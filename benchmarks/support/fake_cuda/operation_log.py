"""Records the work of a fake CUDA step for a GPU: kernels, syncs, copies, and live memory.

Operations of CPU tensors compute values. A read of a CUDA tensor's values returns a default: 1, True, or no index.
"""

# pyright: reportPrivateUsage=false
# Reason: torch has no public names for these functions.

import weakref
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.fake_cuda.call_sites import CallSite, SiteFinder
from benchmarks.support.fake_cuda.operation_costs import (
    KernelCount,
    count_operation,
    get_base_name,
    get_storage_key,
    is_on_cuda,
    list_tensors,
)

_DEVICE = torch.device("cuda", 0)
_SCALAR_READS = {"_local_scalar_dense", "is_nonzero", "item", "equal"}
# The host waits for the GPU in these operations, because the size of the result depends on values.
_SIZE_READS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_COPIES = {"_to_copy", "copy_"}
_BLOCK_BYTES = 512  # torch's allocator rounds up to blocks of this size


class Sync(NamedTuple):
    """A wait of the host for the GPU."""

    kind: str
    site: CallSite


class Copy(NamedTuple):
    """A copy between host and device."""

    direction: Literal["to device", "to host"]
    numel: int
    is_pinned: bool  # whether the host's memory is page-locked
    is_blocking: bool  # whether the host waits for the stream, which it can also do for pinned memory
    site: CallSite

    @property
    def is_pageable(self) -> bool:
        return self.direction == "to device" and not self.is_pinned


class MixedDevices(NamedTuple):
    """An operation that a GPU refuses because it combines CUDA tensors with CPU tensors that are not scalars."""

    operation: str
    site: CallSite


class LiveMemory:
    """Bytes of the live CUDA tensors, as in torch's caching allocator without fragments.

    Each storage counts once, from its first appearance in a result until it is freed.
    """

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.peak_site = CallSite()
        self._counted: set[int] = set()

    def add(self, tensor: Tensor, site: CallSite) -> None:
        storage, key = tensor.untyped_storage(), get_storage_key(tensor)
        if key in self._counted:
            return
        size = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._counted.add(key)
        weakref.finalize(storage, self._remove, key, size)
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_site = self.live_bytes, site

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def _remove(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live_bytes -= size


class OperationLog(TorchDispatchMode):
    """A dispatch mode on top of FakeTensorMode that records operations: see `running_fake_cuda`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo's wrapper would double the time of a call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise torch.compile would not compile functions below this mode

    def __init__(self) -> None:
        super().__init__()
        self.memory = LiveMemory()
        self._sites = SiteFinder()
        self.clear()

    def clear(self) -> None:
        """Start a new recording. Live memory stays."""
        self.counts = defaultdict[tuple[str, str], KernelCount](KernelCount)  # keys: module and function
        self.operations = Counter[tuple[str, str]]()  # kernels by name and call site
        self.syncs: list[Sync] = []
        self.copies: list[Copy] = []
        self.mixed: list[MixedDevices] = []
        self.memory.reset_peak()

    def record_sync(self, kind: str) -> None:
        self.syncs.append(Sync(kind, self._sites.find()))

    def record_kernels(self, name: str, count: KernelCount, site: CallSite) -> None:
        key = site.module, site.function
        self.counts[key] = self.counts[key].plus(count)
        self.operations[name, site.place] += count.kernels

    def find_site(self) -> CallSite:
        return self._sites.find()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default or TracingContext.try_get() is not None:  # torch.compile is tracing
            return func(*args, **kwargs)
        given = list_tensors((args, kwargs))
        if not any(map(is_on_cuda, given)) and not is_on_cuda(kwargs.get("device")):
            return _compute_on_host(func, args, kwargs, given)
        site = self._sites.find()
        out = self._compute(func, args, kwargs, given, site)
        for each in list_tensors(out):
            if is_on_cuda(each):
                self.memory.add(each, site)
        return out

    def _compute(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor], site: CallSite
    ) -> Any:
        base = get_base_name(func)
        if base in _COPIES and (made := self._copy(base, args, kwargs, site)) is not None:
            return made
        if base in _SCALAR_READS or base in _SIZE_READS:
            return self._answer(func, base, given[0], site)
        if torch.is_inference_mode_enabled():  # composite operations arrive undivided in inference mode
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._check_devices(func, base, args, given, site)
        out = func(*args, **kwargs)
        count = count_operation(func, args, kwargs, out)
        if count.kernels:
            self.record_kernels(func.name(), count, site)
        return out

    def _answer(self, func: Any, base: str, tensor: Tensor, site: CallSite) -> Any:
        self.syncs.append(Sync(base, site))
        if base in _SCALAR_READS:
            return give_default(tensor.dtype)
        if base == "nonzero":
            return torch.empty((0, tensor.dim()), dtype=torch.int64, device=_DEVICE)
        if base == "masked_select":
            return torch.empty(0, dtype=tensor.dtype, device=_DEVICE)
        raise NotImplementedError(f"fake CUDA has no default result of {func.name()}")

    def _check_devices(
        self, func: Any, base: str, args: Sequence[Any], given: Sequence[Tensor], site: CallSite
    ) -> None:
        """Record mixed devices, unless the CPU tensors are scalars. Record the host's wait if an index is a mask."""
        on_cuda = [is_on_cuda(each) for each in given]
        if any(on_cuda) and any(each.dim() for each, is_there in zip(given, on_cuda, strict=True) if not is_there):
            self.mixed.append(MixedDevices(func.name(), site))
        if base.startswith("index") and any(each.dtype == torch.bool for each in list_tensors(args[1:2])):
            self.syncs.append(Sync(f"{base} by a mask", site))

    def _copy(self, base: str, args: Sequence[Any], kwargs: Mapping[str, Any], site: CallSite) -> Tensor | None:
        """Return the result of a copy between host and device. Return None for any other copy."""
        source = args[1] if base == "copy_" else args[0]
        target: Any = args[0] if base == "copy_" else torch.device(kwargs.get("device") or source.device)
        to_device, from_device = is_on_cuda(target), is_on_cuda(source)
        if to_device == from_device:
            return None
        asynchronous = bool(args[2] if base == "copy_" and len(args) > 2 else kwargs.get("non_blocking"))
        if base == "copy_":
            made, is_pinned = target, _is_pinned(source if to_device else target)
        else:
            dtype = kwargs.get("dtype") or source.dtype
            made = _make_copy(source, dtype, to_device=to_device)
            is_pinned = _is_pinned(source) if to_device else asynchronous  # asynchronous copies have pinned results
        is_blocking = not asynchronous or not is_pinned
        if source.numel():
            direction = "to device" if to_device else "to host"
            self.copies.append(Copy(direction, source.numel(), is_pinned, is_blocking, site))
            if not to_device and is_blocking:
                self.syncs.append(Sync("copy to host", site))
        return made


def give_default(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 0


def _compute_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Tensor]) -> Any:
    """Compute the values on the host, unless an operand has no values."""
    if any(isinstance(each, FakeTensor) for each in given):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _is_pinned(tensor: Tensor) -> bool:
    with unset_fake_temporarily():
        return not isinstance(tensor, FakeTensor) and tensor.is_pinned()


def _make_copy(source: Tensor, dtype: torch.dtype, *, to_device: bool) -> Tensor:
    if to_device:
        return torch.empty_like(source, dtype=dtype, device=_DEVICE)
    with unset_fake_temporarily():
        return torch.full(source.shape, give_default(dtype), dtype=dtype)


_active: list[OperationLog] = []  # the innermost context is last


def record_host_wait(kind: str) -> None:
    """Record that a function of torch.cuda, such as synchronize, waits."""
    if _active:
        _active[-1].record_sync(kind)


def get_active_log() -> OperationLog | None:
    return _active[-1] if _active else None


@contextmanager
def running_fake_cuda() -> Generator[OperationLog]:
    """Run fake CUDA while the context is open: tensors on "cuda" have no values, and the log records their operations.

    The process must be started with benchmarks/support/fake_cuda/__main__.py.
    """
    log = OperationLog()
    _active.append(log)
    try:
        # Autograd's thread for the device would hide the frames of the caller.
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            log,
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield log
    finally:
        _active.remove(log)
