"""Causal attention of packed sequences: T tokens of several sequences in one row, without padding.

Each token attends to the tokens before it in its own segment. H query heads, K key and value heads, D head_dim.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)  # dtypes of the flash kernels


@cache
def find_causal_options(attention: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of torch's `varlen_attn` for causal attention with fewer key heads than query heads.

    torch 2.10 has is_causal, later versions have window_size. From 2.12 on, fewer key heads need enable_gqa; earlier
    kernels accept them without an option.
    """
    known = inspect.signature(attention).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    return options | ({"enable_gqa": True} if "enable_gqa" in known else {})


@cache
def find_varlen_attention() -> Callable[..., Any] | None:
    """Return torch's `varlen_attn`, or None in torch 2.9, which has no such function."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # slow: loads torch's compiler
    except ImportError:
        return None
    return varlen_attn


class Segments(NamedTuple):
    """The bounds of the sequences in a row."""

    lengths: tuple[int, ...]  # lengths of B segments; their sum is T
    offsets: Tensor  # int32 [B + 1], from 0 to T
    positions_T: Tensor  # int64: position of each token in its segment


def build_segments(lengths: Sequence[int]) -> Segments:
    """Build segments in main memory."""
    return Segments(
        tuple(lengths),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        torch.cat([torch.arange(length) for length in lengths]),
    )


def attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, segments: Segments | None) -> Tensor:
    """Compute causal attention over each row, or over each segment of the only row; [B, T, H, D]."""
    if segments is None:
        return attend_rows(q_BTHD, k_BTKD, v_BTKD)
    return attend_segments(q_BTHD.squeeze(0), k_BTKD.squeeze(0), v_BTKD.squeeze(0), segments).unsqueeze(0)


def attend_segments(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments) -> Tensor:
    """Compute causal attention over each segment, [T, H, D]: in one kernel on GPUs in 16 bits, else in several calls.

    On a CPU, a call for each segment is twice as fast as one call with padded segments, and the backward pass in
    float32 is three times as fast as in bfloat16.
    """
    if q_THD.is_cuda and q_THD.dtype in _VARLEN_DTYPES and (attention := find_varlen_attention()):
        longest, offsets = max(segments.lengths), segments.offsets
        options = find_causal_options(attention)
        out_THD = attention(q_THD, k_TKD, v_TKD, offsets, offsets, longest, longest, **options)
        assert isinstance(out_THD, Tensor)
        return out_THD
    dtype = q_THD.dtype
    exact = dtype if q_THD.is_cuda else torch.promote_types(dtype, torch.float32)
    parts = zip(*(each.to(exact).split(segments.lengths) for each in (q_THD, k_TKD, v_TKD)), strict=True)
    out_THD = torch.cat([attend_rows(*(part[None] for part in of_segment)).squeeze(0) for of_segment in parts])
    return out_THD.to(dtype)


def attend_rows(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """Compute causal attention, [B, T, H, D]. Each of B rows is one sequence."""
    q_BHTD, k_BKTD, v_BKTD = (each.transpose(1, 2) for each in (q_BTHD, k_BTKD, v_BTKD))
    out_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
    return out_BHTD.transpose(1, 2)
