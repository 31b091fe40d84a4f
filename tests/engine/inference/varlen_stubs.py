"""Stand-ins for torch's `varlen_attn`, which runs on GPUs only, with the signatures of its versions.

They compute attention with a mask and only with tensor operations, which a recorded graph can repeat.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    scale: float,
    used: Tensor | None = None,
    tables: Tensor | None = None,
) -> Tensor:
    """Compute causal attention, [N, H, D]. The last query of a sequence attends to all of the sequence's keys."""
    for offsets in (cu_seq_q, cu_seq_k):
        assert offsets.dtype == torch.int32
    assert len(cu_seq_q) == len(cu_seq_k)
    rows = torch.arange(len(query))
    runs = torch.searchsorted(cu_seq_q[1:].contiguous(), rows, right=True)
    num_keys = (cu_seq_k[1:] - cu_seq_k[:-1] if used is None else used)[runs]
    seen = num_keys - (cu_seq_q[1:][runs] - 1 - rows)  # number of keys that each query attends to
    if tables is None:
        numbers = torch.arange(len(key)) - cu_seq_k[:-1][runs][:, None]
        keys, values = (part[None].expand(len(query), -1, -1, -1) for part in (key, value))
    else:
        numbers = torch.arange(tables.shape[1] * key.shape[1])[None].expand(len(query), -1)
        keys, values = (part[tables.long()].flatten(1, 2)[runs] for part in (key, value))
    mask = ((numbers >= 0) & (numbers < seen[:, None]))[:, None, None]
    q, k, v = query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).squeeze(2)


def varlen_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Compute attention, with the signature of torch 2.11."""
    assert window_size == get_mask(max_q)
    assert scale is not None
    check_lengths(cu_seq_q, max_q)
    check_lengths(cu_seq_k, max_k)
    return attend(query, key, value, cu_seq_q, cu_seq_k, scale)


def varlen_2_13(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Compute attention, with the signature of torch 2.13."""
    assert (window_size, enable_gqa, num_splits) == (get_mask(max_q), True, 1)
    assert scale is not None
    check_lengths(cu_seq_q, max_q)
    if block_table is not None:
        assert seqused_k is not None
        assert (seqused_k.dtype, block_table.dtype) == (torch.int32, torch.int32)
        assert max_k == block_table.shape[1] * key.shape[1]
    return attend(query, key, value, cu_seq_q, cu_seq_k, scale, seqused_k, block_table)


def get_mask(max_q: int) -> tuple[int, int]:
    """Return the window of causal attention. Single queries need no mask."""
    return (-1, 0) if max_q > 1 else (-1, -1)


def check_lengths(offsets: Tensor, longest: int) -> None:
    torch._assert_async((offsets[1:] - offsets[:-1]).max() <= longest, "a sequence is longer than announced")
