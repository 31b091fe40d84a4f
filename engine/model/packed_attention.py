"""Causal attention of packed sequences: T tokens of several sequences in one row, without padding.

Each token attends to the tokens before it in its own segment. A segment can continue another segment: the responses to
a prompt attend to the prompt's keys and values, which are computed once. Autograd then adds the gradients of all
responses to the prompt. H query heads, K key and value heads, D head_dim.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asterism.engine.model.prompt_attention import attend_with_prompt

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
    """The bounds of the segments in a row. A segment is a sequence, a shared prompt, or a response to such a prompt."""

    lengths: tuple[int, ...]  # lengths of B segments; their sum is T
    offsets: Tensor  # int32 [B + 1], from 0 to T
    positions_T: Tensor  # int64: position of each token in its sequence
    # Lengths of the segments that belong together: a prompt and its responses, or one sequence. Empty without prompts.
    families: tuple[tuple[int, ...], ...] = ()
    # With shared prompts, the segments attend to S tokens: each response to those of its prompt and its own.
    keys_S: Tensor | None = None  # int64, indices into [T]
    key_offsets: Tensor | None = None  # int32 [B + 1], from 0 to S

    def list_families(self) -> Sequence[Sequence[int]]:
        return self.families or [(length,) for length in self.lengths]


def build_segments(lengths: Sequence[int]) -> Segments:
    """Build segments of whole sequences in main memory."""
    return build_families([(length,) for length in lengths])


def build_families(families: Sequence[Sequence[int]]) -> Segments:
    """Build segments in main memory. `families`: lengths of a sequence, or of a prompt and of the responses to it."""
    lengths = [length for family in families for length in family]
    starts = [0, *accumulate(lengths)]
    segments = Segments(
        tuple(lengths),
        torch.tensor(starts, dtype=torch.int32),
        torch.cat([torch.arange(length) for length in lengths]),
    )
    if len(lengths) == len(families):
        return segments
    positions, keys, first = list[Tensor](), list[Tensor](), 0
    for prompt, *responses in families:
        of_prompt = torch.arange(first, first + prompt)
        positions += [torch.arange(prompt), *(torch.arange(prompt, prompt + each) for each in responses)]
        keys.append(of_prompt)
        first += prompt
        for response in responses:
            keys += [of_prompt, torch.arange(first, first + response)]
            first += response
    num_keys = [family[0] + each for family in families for each in (0, *family[1:])]
    return segments._replace(
        positions_T=torch.cat(positions),
        families=tuple(tuple(family) for family in families),
        keys_S=torch.cat(keys),
        key_offsets=torch.tensor([0, *accumulate(num_keys)], dtype=torch.int32),
    )


def can_share_prompts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether segments can continue a prompt: on CPUs, and on GPUs in 16 bits with torch's `varlen_attn`."""
    return device.type == "cpu" or (dtype in _VARLEN_DTYPES and find_varlen_attention() is not None)


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
        return _attend_in_one_kernel(attention, q_THD, k_TKD, v_TKD, segments)
    dtype = q_THD.dtype
    exact = dtype if q_THD.is_cuda else torch.promote_types(dtype, torch.float32)
    families = segments.list_families()
    sizes, found = [sum(lengths) for lengths in families], list[Tensor]()
    parts = (each.to(exact).split(sizes) for each in (q_THD, k_TKD, v_TKD))
    for q_FHD, k_FKD, v_FKD, lengths in zip(*parts, families, strict=True):
        if len(lengths) > 1:
            found.append(attend_with_prompt(q_FHD, k_FKD, v_FKD, lengths))
        else:
            found.append(attend_rows(q_FHD[None], k_FKD[None], v_FKD[None]).squeeze(0))
    return torch.cat(found).to(dtype)


def _attend_in_one_kernel(
    attention: Callable[..., Any], q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: Segments
) -> Tensor:
    """Compute attention of all segments. With fewer queries than keys, the kernel aligns the last query with the last key."""
    k_SKD, v_SKD, key_offsets = k_TKD, v_TKD, segments.offsets
    if segments.keys_S is not None and segments.key_offsets is not None:
        k_SKD, v_SKD = (each.index_select(0, segments.keys_S) for each in (k_TKD, v_TKD))
        key_offsets = segments.key_offsets
    longest_keys = max(family[0] + max((0, *family[1:])) for family in segments.list_families())
    options = find_causal_options(attention)
    out_THD = attention(
        q_THD, k_SKD, v_SKD, segments.offsets, key_offsets, max(segments.lengths), longest_keys, **options
    )
    assert isinstance(out_THD, Tensor)
    return out_THD


def attend_rows(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """Compute causal attention, [B, T, H, D]. Each of B rows is one sequence."""
    q_BHTD, k_BKTD, v_BKTD = (each.transpose(1, 2) for each in (q_BTHD, k_BTKD, v_BTKD))
    out_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
    return out_BHTD.transpose(1, 2)
