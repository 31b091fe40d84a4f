"""Counts an operation's costs on a GPU: kernels, bytes of memory traffic, and floating-point operations of products.

Bytes count each operand and result once, as if no cache held it. A gather or scatter touches only the rows that it
selects. Products count 2 FLOPs per multiplication and addition; causal attention counts half of the square. An
operation on lists of tensors counts as one kernel, although a long list needs several kernels on a GPU.
"""

# pyright: reportPrivateUsage=false
# Reason: torch has no public names for these functions.

from collections.abc import Mapping, Sequence
from math import prod
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
# Operations that do not read their first operand.
_WRITES_FIRST = {"copy_", "_foreach_copy_", "fill_", "zero_", "normal_", "uniform_"}
# Operations that read or write only the selected elements of their first operand.
_SELECTED = {
    *("embedding", "gather", "index_select", "index"),
    *("scatter_add_", "scatter_", "index_put_", "index_copy_", "index_add_"),
}
_ATTENTION = {
    "_varlen_attn": (0, 1.0),  # (position of the queries, passes over the square of tokens)
    "_varlen_attn_backward": (1, 2.5),
    "_scaled_dot_product_flash_attention": (0, 1.0),
    "_scaled_dot_product_flash_attention_backward": (1, 2.5),
    "_scaled_dot_product_efficient_attention": (0, 1.0),
    "_scaled_dot_product_efficient_attention_backward": (1, 2.5),
}


class KernelCount(NamedTuple):
    """Counts of one operation, or their sum over many operations."""

    kernels: int = 0  # launches; a product or a fused kernel counts as one
    products: int = 0  # kernels that compute matrix products
    pointwise_bytes: int = 0  # bytes of all kernels besides products and attention
    product_bytes: int = 0
    product_flops: int = 0
    attention_bytes: int = 0
    attention_flops: float = 0.0

    def plus(self, other: "KernelCount") -> "KernelCount":
        return KernelCount(*map(add, self, other))  # pyright: ignore[reportArgumentType] - all but the last are integers

    @property
    def total_bytes(self) -> int:
        return self.pointwise_bytes + self.product_bytes + self.attention_bytes


def is_on_cuda(value: object) -> bool:
    """Return whether `value` is a CUDA tensor, or the name of a CUDA device."""
    if isinstance(value, FakeTensor):  # reading `device` would itself be counted as an operation
        return value.fake_device.type == "cuda"
    if isinstance(value, Tensor):
        return value.is_cuda
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def get_storage_key(tensor: Tensor) -> int:
    """Return a key of the tensor's memory. Tensors that share memory have equal keys while the memory is alive."""
    return tensor.untyped_storage()._cdata


def list_tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> KernelCount:
    """Count an operation. Views, allocations and operations that return their operand count as 0."""
    given, made = list_tensors(args), list_tensors(out)
    base = get_base_name(func)
    if _is_view(func, [*given, *list_tensors(kwargs)], made) or base.startswith(("empty", "new_empty")):
        return KernelCount()
    made = made or _list_mutated(func, args, kwargs)
    moved = _count_bytes(base, args, given, made)
    if base in _PRODUCTS:
        return KernelCount(1, 1, product_bytes=moved, product_flops=count_product_flops(base, args, made[0]))
    if base in _ATTENTION:
        return KernelCount(1, attention_bytes=moved, attention_flops=_count_attention_flops(base, args))
    return KernelCount(1, pointwise_bytes=moved)


def get_base_name(func: Any) -> str:
    return func.name().split("::")[1].split(".")[0]


def count_product_flops(base: str, args: Sequence[Any], out: Tensor) -> int:
    """Count 2 * rows * columns * inner, from the shapes of the result and of the left factor."""
    left = args[1] if base in ("addmm", "baddbmm") else args[0]
    return 2 * prod(out.shape) * left.shape[-1]


def _count_attention_flops(base: str, args: Sequence[Any]) -> float:
    """Count half of the square, as attention is causal. Each segment of a row counts as the longest segment."""
    place, passes = _ATTENTION[base]
    q, k = args[place], args[place + 1]
    if base.startswith("_varlen"):  # [T, H, D]
        longest = next(value for value in args[place + 3 :] if isinstance(value, int))
        tokens, heads, size = q.shape
        return passes * 2.0 * tokens * longest * heads * size
    batch, heads, tokens, size = q.shape
    return passes * 2.0 * batch * heads * tokens * k.shape[2] * size


def _count_bytes(base: str, args: Sequence[Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    read = [count_memory(each) for each in given if is_on_cuda(each)]
    written = sum(count_memory(each) for each in made if is_on_cuda(each))
    if base in _WRITES_FIRST:
        return sum(read[len(list_tensors(args[0])) :]) + written
    if base not in _SELECTED:
        return sum(read) + written
    if base.endswith("_"):  # reads indices and values, and writes the bytes of the values
        return sum(read[1:]) + max(read[1:], default=0)
    return sum(read[1:]) + 2 * written


def count_memory(tensor: Tensor) -> int:
    """Count the bytes of the elements in memory. A dimension from expand() counts as size 1."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sizes if stride) * tensor.element_size() if tensor.numel() else 0


def _list_mutated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """List the operands that an operation without a result writes. An example is an update of many parameters."""
    declared = func._schema.arguments
    named = zip((each.name for each in declared), args, strict=False)
    values = dict(named) | dict(kwargs)
    written = [each.name for each in declared if each.alias_info is not None and each.alias_info.is_write]
    return [tensor for name in written for tensor in list_tensors(values.get(name))]


def _is_view(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    operands = set(map(get_storage_key, given))
    return all(get_storage_key(each) in operands for each in made)


def sum_counts(counts: Sequence[KernelCount]) -> KernelCount:
    total = KernelCount()
    for each in counts:
        total = total.plus(each)
    return total
