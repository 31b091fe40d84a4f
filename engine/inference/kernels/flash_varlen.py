"""The engine's calls of torch's variable-length flash attention (`varlen_attn`): causal, with scaled queries.

The kernel needs a GPU and 16 bits. Its options differ between versions of torch: see `select_flash`.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asterism.engine.model.packed_attention import find_causal_options, find_varlen_attention

_MASK_OPTIONS = ("window_size", "is_causal")
_DTYPES = (torch.bfloat16, torch.float16)


class Queries(NamedTuple):
    """C runs of consecutive tokens, each of one sequence, without gaps from offset 0 to the number of rows."""

    offsets: Tensor  # int32 [C + 1]
    longest: int  # tokens of the longest run


class FlashKernel:
    """A causal kernel: query i of a run of n attends to the first S - n + 1 + i of its sequence's S keys."""

    def __init__(self, attention: Callable[..., Any]) -> None:
        known = inspect.signature(attention).parameters
        self._attention = attention
        self.can_read_pages = known.keys() >= {"block_table", "seqused_k"}
        self._causal_options = find_causal_options(attention) | {"scale": 1.0}
        if "num_splits" in known:  # torch 2.13's default returns NaN for paged keys
            self._causal_options["num_splits"] = 1

    def attend_packed(
        self, q_NHD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, queries: Queries, keys: Queries
    ) -> Tensor:
        """Compute attention, [N, H, D]. Sequence c has the keys of run c of `keys`."""
        offsets, longest = (queries.offsets, keys.offsets), (queries.longest, keys.longest)
        return self._attention(q_NHD, keys_SKD, values_SKD, *offsets, *longest, **self._get_options(queries))

    def attend_pages(
        self,
        q_NHD: Tensor,
        keys_PTKD: Tensor,
        values_PTKD: Tensor,
        queries: Queries,
        keys: Queries,
        tables_CW: Tensor,
        num_keys_C: Tensor,
    ) -> Tensor:
        """Compute [N, H, D]. Sequence c has `num_keys_C[c]` keys in the pages `tables_CW[c]` of T tokens; both int32.

        `keys`: valid offsets of at most W * T keys each; torch requires them, but the kernel does not read them.
        """
        offsets, longest = (queries.offsets, keys.offsets), (queries.longest, keys.longest)
        pages = {"seqused_k": num_keys_C, "block_table": tables_CW}
        return self._attention(q_NHD, keys_PTKD, values_PTKD, *offsets, *longest, **pages, **self._get_options(queries))

    def _get_options(self, queries: Queries) -> dict[str, Any]:
        """Omit the mask for single queries, which attend to all keys: the kernel then reads keys once per group."""
        if queries.longest > 1:
            return self._causal_options
        return {name: value for name, value in self._causal_options.items() if name not in _MASK_OPTIONS}


def select_flash(device: torch.device, dtype: torch.dtype) -> FlashKernel | None:
    """Return the kernel, or None if this device, dtype or version of torch (2.9 and 2.10) has no such kernel."""
    attention = find_varlen_attention() if device.type == "cuda" and dtype in _DTYPES else None
    if attention is None or "scale" not in inspect.signature(attention).parameters:
        return None
    return FlashKernel(attention)
