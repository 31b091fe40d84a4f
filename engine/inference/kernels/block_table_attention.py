"""Attention that reads keys and values in place, by block tables, without gathering and without padding of keys.

A layer has one call for the running sequences and one call for the prompts. The kernel needs CUDA, 16 bits, pages of a
multiple of 256 tokens, and a version of torch with this kernel.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.engine.contract import Capacity
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.buffer_sizes import PAGE_TOKENS_STEP
from asterism.engine.inference.kernels.attention import CachedAttention, PagedAttention
from asterism.engine.inference.kernels.attention_kernels import AttentionKernels
from asterism.engine.inference.kernels.flash_varlen import FlashKernel, Queries, select_flash
from asterism.engine.inference.kv.kv_cache import KeyValueCache, KvCache
from asterism.engine.inference.kv.token_major_cache import TokenMajorCache
from asterism.engine.inference.sequence import PrefillChunk


class TableBlock(NamedTuple):
    """The rows [first, end) of C sequences."""

    first: int
    end: int
    queries: Queries
    tables: Tensor  # int32 [C, W]
    num_keys: Tensor | None  # int32 [C]; None: each row is one sequence, with keys up to the row's position


class BlockTableAttention:
    """A CachedAttention (kernels/attention.py) without gathering. Plans contain the number of keys of each sequence."""

    reads_pages = True

    def __init__(self, cache: TokenMajorCache, flash: FlashKernel, max_sequence_tokens: int) -> None:
        self._cache, self._flash = cache, flash
        self.max_pages = cache.count_pages(max_sequence_tokens)

    def build_row_blocks(self, first: int, tokens_R: Sequence[int], tables_RN: Tensor) -> list[TableBlock]:
        count = len(tokens_R)
        if not count:
            return []
        offsets = torch.arange(count + 1, dtype=torch.int32, device=tables_RN.device)
        return [TableBlock(first, first + count, Queries(offsets, 1), tables_RN.to(torch.int32), None)]

    def build_decode_blocks(
        self, join_ids: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor
    ) -> list[TableBlock]:
        return self.build_row_blocks(0, tokens_B, tables_BN)

    def list_prefill_arrays(self, chunks: Sequence[PrefillChunk]) -> list[NDArray[Any]]:
        """Return the offsets of the chunks' rows, their numbers of keys, and their block tables."""
        offsets = np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)])
        ends = [chunk.end for chunk in chunks]
        tables = np.full((len(chunks), self._cache.count_pages(max(ends))), self._cache.padding_page, np.int32)
        for table, chunk in zip(tables, chunks, strict=True):
            num_pages = self._cache.count_pages(chunk.end)
            table[:num_pages] = chunk.sequence.pages[:num_pages]
        return [offsets.astype(np.int32), np.array(ends, np.int32), tables]

    def build_prefill_blocks(
        self, first: int, chunks: Sequence[PrefillChunk], arrays: Sequence[Tensor]
    ) -> list[TableBlock]:
        if not chunks:
            return []
        lengths = [chunk.end - chunk.start for chunk in chunks]
        offsets, num_keys, tables = arrays
        return [TableBlock(first, first + sum(lengths), Queries(offsets, max(lengths)), tables, num_keys)]

    def order_by_length(self, join_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Keep the order: any order suits this kernel."""
        return list(range(len(join_ids)))

    def clear_dense_cache(self) -> None:
        """Do nothing: this attention keeps no copies."""

    def plan(self, positions_N: Tensor, blocks: Sequence[TableBlock]) -> list[tuple[Tensor, Queries]]:
        """Return each block's numbers of keys, int32, and key offsets, which torch requires but does not read."""
        plans: list[tuple[Tensor, Queries]] = []
        for block in blocks:
            num_keys = block.num_keys
            if num_keys is None:
                num_keys = (positions_N[block.first : block.end] + 1).to(torch.int32)
            widest = block.tables.shape[1] * self._cache.page_tokens
            offsets = torch.arange(len(num_keys) + 1, dtype=torch.int32, device=num_keys.device) * widest
            plans.append((num_keys, Queries(offsets, widest)))
        return plans

    def __call__(
        self,
        layer: int,
        q_NHD: Tensor,
        new_NJD: Tensor,
        plans: Sequence[tuple[Tensor, Queries]],
        blocks: Sequence[TableBlock],
    ) -> Tensor:
        """See PagedAttention.__call__."""
        keys_PTKD, values_PTKD = self._cache.get_pages(layer)
        parts = [
            self._flash.attend_pages(
                q_NHD[block.first : block.end], keys_PTKD, values_PTKD, block.queries, keys, block.tables, num_keys
            )
            for block, (num_keys, keys) in zip(blocks, plans, strict=False)
        ]
        out_NHD = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_NHD.flatten(1)


def build_attention(
    config: DecoderConfig,
    capacity: Capacity,
    dtype: torch.dtype,
    device: torch.device,
    kernels: AttentionKernels | None = None,
) -> tuple[KeyValueCache, CachedAttention]:
    """Build cache and attention for this device, dtype, page size and torch version. `capacity` has whole pages.

    `kernels`: see PagedAttention.
    """
    page_tokens, flash = capacity.page_tokens, select_flash(device, dtype)
    num_pages = capacity.kv_tokens // page_tokens
    if flash is not None and flash.can_read_pages and page_tokens % PAGE_TOKENS_STEP == 0:
        pages = TokenMajorCache(config, num_pages, page_tokens, dtype, device)
        return pages, BlockTableAttention(pages, flash, capacity.sequence_tokens)
    cache = KvCache(config, num_pages, page_tokens, dtype, device)
    return cache, PagedAttention(cache, capacity.sequence_tokens, flash, kernels)
