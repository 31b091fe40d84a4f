"""Causal attention of several responses to one prompt on a CPU, without copies of the prompt's keys and values.

Softmax over all keys is combined from softmax over the prompt and softmax over the response, by the logarithms of their
sums. So one call computes attention of all responses to the prompt, and the backward pass adds the gradients of all
responses to the prompt's keys and values. F tokens of prompt and responses, H query heads, K key and value heads, D
head_dim.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_with_prompt(q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute attention, [F, H, D]. `lengths`: numbers of tokens of the prompt and of each response."""
    found: Any = _PromptAttention.apply(q_FHD, k_FKD, v_FKD, tuple(lengths))
    return found


class _KeyBlock(NamedTuple):
    """Queries that attend to keys, as slices of the F tokens."""

    queries: slice
    keys: slice
    is_causal: bool


def _iter_blocks(lengths: Sequence[int]) -> Iterator[_KeyBlock]:
    """Yield a block for the prompt, one for each response, and last the block of all responses and the prompt."""
    for first, end in pairwise([0, *accumulate(lengths)]):
        yield _KeyBlock(slice(first, end), slice(first, end), is_causal=True)
    yield _KeyBlock(slice(lengths[0], sum(lengths)), slice(0, lengths[0]), is_causal=False)


class _PromptAttention(Function):
    @staticmethod
    def forward(ctx: Any, q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor, lengths: tuple[int, ...]) -> Tensor:
        q, k, v = _arrange(q_FHD, k_FKD, v_FKD)
        found = [
            _attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], 0.0, is_causal)
            for rows, keys, is_causal in _iter_blocks(lengths)
        ]
        out, log_sums = (torch.cat(parts, 2) for parts in zip(*found[:-1], strict=True))
        of_prompt, prompt_sums = found[-1]
        own, own_sums = out[:, :, lengths[0] :], log_sums[:, :, lengths[0] :]
        both_sums = torch.logaddexp(own_sums, prompt_sums)
        own.mul_((own_sums - both_sums).exp_()[..., None])
        own.addcmul_(of_prompt, (prompt_sums - both_sums).exp_()[..., None].to(of_prompt.dtype))
        own_sums.copy_(both_sums)
        ctx.save_for_backward(q_FHD, k_FKD, v_FKD, out, log_sums)
        ctx.lengths = lengths
        return out[0].transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Add the gradients of all blocks. A block's weights follow from the sums over all keys of its queries."""
        q_FHD, k_FKD, v_FKD, out, log_sums = ctx.saved_tensors
        q, k, v = _arrange(q_FHD, k_FKD, v_FKD)
        gradient = gradients[0].transpose(0, 1)[None]
        totals = [torch.zeros_like(each) for each in (q, k, v)]
        for rows, keys, is_causal in _iter_blocks(ctx.lengths):
            found = _differentiate(
                gradient[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys],
                out[:, :, rows], log_sums[:, :, rows], 0.0, is_causal,
            )  # fmt: skip
            for total, part, place in zip(totals, found, (rows, keys, keys), strict=True):
                total[:, :, place] += part
        of_q, *of_keys = (each[0].transpose(0, 1) for each in totals)
        return of_q, *(each.unflatten(1, (k_FKD.shape[1], -1)).sum(2) for each in of_keys), None


def _arrange(q_FHD: Tensor, k_FKD: Tensor, v_FKD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [1, H, F, D] with as many key heads as query heads, which the kernel of older versions of torch needs."""
    copies = q_FHD.shape[1] // k_FKD.shape[1]
    keys = (each.transpose(0, 1) for each in (k_FKD, v_FKD))
    k_HFD, v_HFD = (each if copies == 1 else each.repeat_interleave(copies, 0) for each in keys)
    return q_FHD.transpose(0, 1)[None], k_HFD[None], v_HFD[None]
