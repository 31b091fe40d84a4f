"""Replaces CUDA functions that a CPU build of torch lacks. The patches are permanent, so they need a separate process.

functions of torch.cuda      raise in a CPU build ("not compiled with CUDA enabled")
torch.version.cuda           selects Inductor's CUDA code
scaled_dot_product_attention selects a kernel in compiled code; the patch selects as an H100 does: flash without a
                             mask in 16 bits, memory-efficient otherwise
rms_norm                     is one kernel on CUDA, which a CPU build decomposes
tensor, new_tensor           copy to the device below the modes that record operations
tolist                       reads a fake tensor value by value, but a CUDA tensor at once
torch.compile                compiles for a GPU; the patch counts Inductor's kernels (inductor_counts.py)
"""

# pyright: reportPrivateUsage=false
# Reason: torch has no public names for these functions.

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from benchmarks.support.fake_cuda.inductor_counts import compile_for_counts
from benchmarks.support.fake_cuda.operation_costs import is_on_cuda
from benchmarks.support.fake_cuda.operation_log import get_active_log, give_default, record_host_wait

_GPU = SimpleNamespace(
    name="fake H100", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
)  # fmt: skip


class _Stream:
    """A stream without asynchrony: all of its events are ready at once."""

    device, cuda_stream, stream_id, device_index, device_type = torch.device("cuda", 0), 0, 0, 0, 1

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def synchronize(self) -> None:
        record_host_wait("Stream.synchronize")


class _Event:
    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def record(self, _stream: Any = None) -> None:
        pass

    def wait(self, _stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        record_host_wait("Event.synchronize")


def _always(value: object) -> Callable[..., Any]:
    """Return a new function with a constant result. Dynamo needs a separate function for each name of torch.cuda."""
    return lambda *_arguments, **_options: value


def _synchronize(_device: Any = None) -> None:
    record_host_wait("torch.cuda.synchronize")


def patch_torch() -> None:
    """Patch torch. Call native_stub.load_stub first."""
    replacements: dict[str, Any] = {
        "is_available": _always(True),
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": _always(None),
        "_lazy_init": _always(None),  # Dynamo calls this function to read the current stream
        "synchronize": _synchronize,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _always(_Stream()),
        "stream": _always(nullcontext()),
        "get_device_capability": _always((_GPU.major, _GPU.minor)),
        "get_device_properties": _always(_GPU),
        "get_rng_state": _always(torch.zeros(16, dtype=torch.uint8)),  # AOTAutograd saves this value
        "set_rng_state": _always(None),
        "is_current_stream_capturing": _always(False),  # the fused optimizer calls this function
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.version.cuda = "13.0"
    FakeTensor.tolist = _read_list  # pyright: ignore[reportAttributeAccessIssue]
    for owner, name, replacement in (
        (torch, "tensor", _make_tensor),
        (Tensor, "new_tensor", _make_similar_tensor),
        (functional, "scaled_dot_product_attention", _attend),
        (functional, "rms_norm", _normalize),
    ):
        _replace_function(owner, name, replacement)
    torch.compile = compile_for_counts  # pyright: ignore[reportAttributeAccessIssue]


def _replace_function(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function by `replacement`, which also receives the original. While torch traces, the original runs.

    A TorchFunctionMode would be inactive in the backward pass, in which checkpointing recomputes.
    """
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or get_active_log() is None:
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    setattr(owner, name, call)


def _make_tensor(original: Any, data: Any, *, device: Any = None, **options: Any) -> Tensor:
    made = original(data, **options)
    return made.to(device) if is_on_cuda(device) else made


def _make_similar_tensor(original: Any, tensor: Tensor, data: Any, **options: Any) -> Tensor:
    if not is_on_cuda(tensor):
        return original(tensor, data, **options)
    defaults: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
    return torch.tensor(data, **(defaults | options))


def _read_list(tensor: FakeTensor) -> Any:
    if tensor.numel():
        record_host_wait("tolist")
    value: Any = give_default(tensor.dtype)
    for size in reversed(tensor.shape):
        value = [value] * size
    return value


def _attend(
    original: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not is_on_cuda(q):
        return original(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # this kernel needs as many key heads as query heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = None if attn_mask is None else attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, mask, q.requires_grad, 0.0, is_causal, scale=scale)[0]


def _normalize(original: Any, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if not is_on_cuda(x) or weight is None:
        return original(x, shape, weight, eps)
    return torch.ops.fake_cuda.rms_norm(x, weight)[0]


@torch.library.custom_op("fake_cuda::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the result and the inverse roots in one operation, like aten::_fused_rms_norm on CUDA."""
    raise NotImplementedError


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("fake_cuda::rms_norm_backward", mutates_args=())
def _rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@_rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the inverse roots are not differentiable
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(ctx: Any, gradient: Tensor, _inverse_gradient: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.ops.fake_cuda.rms_norm_backward(gradient, *ctx.saved_tensors)


_rms_norm.register_autograd(_differentiate, setup_context=_save_inputs)
