"""Paged attention: a row contains one token's queries, which attend to the keys of its sequence up to its position.

On a CPU in float32 the bits of a row do not depend on the other rows, nor on whether its token is prefilled or decoded.
Every row is a separate product of the same shape except for its width; the width's padding adds exact zeros
(engine/inference/kernels/attention_kernels.py), and widths are multiples of a step (engine/inference/kv/kv_cache.py).

Gathered rows of running sequences are kept between steps (engine/inference/kv/contiguous_kv.py). Rows of prompts are
gathered in each pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asterism.engine.inference.buffer_sizes import count_gather_tokens
from asterism.engine.inference.kernels.attention_kernels import AttentionKernels, select_kernels
from asterism.engine.inference.kernels.flash_varlen import FlashKernel
from asterism.engine.inference.kernels.packed_prompts import (
    NUM_ARRAYS,
    PackedPrompts,
    attend_prompts,
    build_packed_prompts,
    group_prompts,
    list_prompt_arrays,
)
from asterism.engine.inference.kv.contiguous_kv import DenseKvBlock, DenseKvCache
from asterism.engine.inference.kv.kv_cache import KvCache
from asterism.engine.inference.sequence import PrefillChunk, enumerate_chunks


class GatheredBlock(NamedTuple):
    """The rows [first, end), with pages that are gathered in each layer of a pass."""

    first: int
    end: int
    width: int  # tokens per row, with padding
    page_index: Tensor  # index of KvCache.gather
    is_shared: bool = False  # whether all rows have the same pages, gathered once


class DenseBlock(NamedTuple):
    """The rows [first, end), with copies of their keys and values that are kept between passes."""

    first: int
    end: int
    width: int
    dense: DenseKvBlock


# rows that attention computes together, from `first` to `end`
RowBlock = GatheredBlock | DenseBlock | PackedPrompts


class AttentionPlan(NamedTuple):
    """The inputs of a block that are equal in all layers of a pass."""

    mask_R1W: Tensor  # contains 0 and -inf; empty for packed prompts
    addresses: Tensor  # addresses at which a dense block stores the new tokens; empty for other blocks


class CachedAttention(Protocol):
    """The interface of PagedAttention and of BlockTableAttention (kernels/block_table_attention.py)."""

    max_pages: int  # number of pages in a block table

    @property
    def reads_pages(self) -> bool:
        """Return whether attention takes the same time with a wider block table."""
        ...

    def build_row_blocks(self, first: int, tokens_R: Sequence[int], tables_RN: Tensor) -> Sequence[Any]: ...

    def build_decode_blocks(
        self, join_ids: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor
    ) -> Sequence[Any]: ...

    def list_prefill_arrays(self, chunks: Sequence[PrefillChunk]) -> list[NDArray[Any]]: ...

    def build_prefill_blocks(
        self, first: int, chunks: Sequence[PrefillChunk], arrays: Sequence[Tensor]
    ) -> Sequence[Any]: ...

    def order_by_length(self, join_ids: Sequence[int], tokens: Sequence[int]) -> list[int]: ...

    def clear_dense_cache(self) -> None: ...

    def plan(self, positions_N: Tensor, blocks: Sequence[Any]) -> Sequence[Any]: ...

    def __call__(
        self, layer: int, q_NHD: Tensor, new_NJD: Tensor, plans: Sequence[Any], blocks: Sequence[Any]
    ) -> Tensor: ...


class PagedAttention:
    """A CachedAttention that gathers pages into contiguous memory."""

    reads_pages = False

    def __init__(
        self,
        cache: KvCache,
        max_sequence_tokens: int,
        flash: FlashKernel | None = None,
        kernels: AttentionKernels | None = None,
    ) -> None:
        """`flash`: the kernel for prompts, if the device has one. `kernels`: by default those of `select_kernels`."""
        self._cache, self._flash = cache, flash
        memory = cache.memory
        self._kernels = kernels or select_kernels(memory.device)
        self.max_pages = cache.count_padded_pages(max_sequence_tokens)
        widest = self.max_pages * cache.page_tokens
        self._max_block_tokens = count_gather_tokens(memory.device.type, cache.token_bytes, widest)
        size = self._max_block_tokens * 2 * cache.num_kv_heads * cache.head_dim
        self._buffer = torch.empty(size, dtype=memory.dtype, device=memory.device)
        self._positions = torch.arange(widest, device=memory.device)
        self._empty = self._positions[:0]
        self._masked, self._unmasked = (self._buffer.new_tensor(value) for value in (float("-inf"), 0.0))
        self._dense_cache = DenseKvCache(cache, self._buffer)

    # ------------------------------------------------------------ blocks

    def build_row_blocks(self, first: int, tokens_R: Sequence[int], tables_RN: Tensor) -> list[RowBlock]:
        """Build blocks for the rows from `first` on; their pages are gathered in each pass.

        `tokens_R`: tokens that each row can attend to; sorted lengths need less padding. `tables_RN`: block tables as
        wide as `count_padded_pages` of the largest number.
        """
        blocks: list[RowBlock] = []
        start = 0
        while start < len(tokens_R):
            end, pages = start, 0
            while end < len(tokens_R):
                wider = max(pages, self._cache.count_padded_pages(tokens_R[end]))
                if end > start and (end + 1 - start) * wider * self._cache.page_tokens > self._max_block_tokens:
                    break
                end, pages = end + 1, wider
            index = self._cache.build_page_index(tables_RN[start:end, :pages])
            blocks.append(GatheredBlock(first + start, first + end, pages * self._cache.page_tokens, index))
            start = end
        return blocks

    def list_prefill_arrays(self, chunks: Sequence[PrefillChunk]) -> list[NDArray[Any]]:
        """Return the arrays that `build_prefill_blocks` needs on the device."""
        if self._flash is not None:
            page_tokens, groups = self._cache.page_tokens, group_prompts(chunks, self._max_block_tokens)
            return [array for group in groups for array in list_prompt_arrays(group, page_tokens)]
        return [self._build_block_table(chunk) for chunk in chunks]

    def build_prefill_blocks(
        self, first: int, chunks: Sequence[PrefillChunk], arrays: Sequence[Tensor]
    ) -> list[RowBlock]:
        """Build blocks for the chunks' tokens, in the rows from `first` on. `arrays`: from `list_prefill_arrays`."""
        blocks: list[RowBlock] = []
        if self._flash is not None:
            for number, group in enumerate(group_prompts(chunks, self._max_block_tokens)):
                prompts = build_packed_prompts(first, group, arrays[number * NUM_ARRAYS : (number + 1) * NUM_ARRAYS])
                blocks.append(prompts)
                first = prompts.end
            return blocks
        for (start, chunk), table_N in zip(enumerate_chunks(chunks), arrays, strict=True):
            count, row = chunk.end - chunk.start, first + start
            if count > self._kernels.max_rowwise_tokens:
                width, index = len(table_N) * self._cache.page_tokens, self._cache.build_page_index(table_N[None])
                blocks.append(GatheredBlock(row, row + count, width, index, is_shared=True))
            else:
                blocks += self.build_row_blocks(row, [chunk.end] * count, table_N.expand(count, -1))
        return blocks

    def _build_block_table(self, chunk: PrefillChunk) -> NDArray[np.int64]:
        """Return the pages of the sequence's first `end` tokens, padded as KvCache.build_page_index expects."""
        table_N = np.full(self._cache.count_padded_pages(chunk.end), self._cache.padding_page)
        num_pages = self._cache.count_pages(chunk.end)
        table_N[:num_pages] = chunk.sequence.pages[:num_pages]
        return table_N

    def order_by_length(self, join_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """See DenseKvCache.order_by_length."""
        return self._dense_cache.order_by_length(join_ids, tokens)

    def build_decode_blocks(
        self, join_ids: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor
    ) -> list[RowBlock]:
        """Build blocks for running sequences, in the order of `order_by_length`.

        A join id identifies one request of a sequence; nothing is gathered for a request that keeps its row. Block
        tables have the width of the longest possible sequence.
        """
        blocks: list[RowBlock] = []
        first = 0
        for dense in self._dense_cache.assign_blocks(join_ids, tokens_B, tables_BN):
            end = first + dense.num_rows
            width = self._cache.count_padded_pages(max(tokens_B[first:end])) * self._cache.page_tokens
            blocks.append(DenseBlock(first, end, width, dense))
            first = end
        return blocks + self.build_row_blocks(first, tokens_B[first:], tables_BN[first:])

    def clear_dense_cache(self) -> None:
        """Drop kept copies after keys or values were not finite."""
        self._dense_cache.clear()

    # ------------------------------------------------------------ one pass

    def plan(self, positions_N: Tensor, blocks: Sequence[RowBlock]) -> list[AttentionPlan]:
        return [self._plan_block(positions_N[block.first : block.end], block) for block in blocks]

    def _plan_block(self, positions_R: Tensor, block: RowBlock) -> AttentionPlan:
        match block:
            case PackedPrompts():
                return AttentionPlan(self._empty, self._empty)
            case DenseBlock():
                return AttentionPlan(
                    self._build_mask(positions_R, block.width), block.dense.compute_addresses(positions_R)
                )
            case GatheredBlock():
                return AttentionPlan(self._build_mask(positions_R, block.width), self._empty)
            case _:
                assert_never(block)

    def _build_mask(self, positions_R: Tensor, width: int) -> Tensor:
        masked_R1W = self._positions[:width] > positions_R[:, None, None]
        return torch.where(masked_R1W, self._masked, self._unmasked)

    def __call__(
        self, layer: int, q_NHD: Tensor, new_NJD: Tensor, plans: Sequence[AttentionPlan], blocks: Sequence[RowBlock]
    ) -> Tensor:
        """Compute attention, [M, H * D], for the M <= N rows that the blocks cover without a gap. Queries are scaled.

        `new_NJD`: the keys and values of the pass, already in the cache; J = 2 * K. There can be more plans than
        blocks.
        """
        count, heads = blocks[-1].end, self._cache.num_kv_heads
        q_XGD = q_NHD[:count].reshape(count * heads, -1, q_NHD.shape[-1])
        out_XGD = torch.empty_like(q_XGD)
        for block, plan in zip(blocks, plans, strict=False):
            rows = slice(block.first * heads, block.end * heads)
            new_RJD = new_NJD[block.first : block.end]
            self._attend_block(layer, q_XGD[rows], new_RJD, block, plan, out_XGD[rows])
        return out_XGD.view(count, -1)

    def _attend_block(
        self, layer: int, q_XGD: Tensor, new_RJD: Tensor, block: RowBlock, plan: AttentionPlan, out_XGD: Tensor
    ) -> None:
        """Compute attention of the block's R rows; X = R * K."""
        size = q_XGD.shape[-1]
        match block:
            case PackedPrompts():
                assert self._flash is not None
                q_RHD, out_RHD = (part.view(len(new_RJD), -1, size) for part in (q_XGD, out_XGD))
                out_RHD.copy_(attend_prompts(self._flash, self._cache, layer, q_RHD, new_RJD, block, self._buffer))
            case DenseBlock():
                keys, values = block.dense.update(layer, plan.addresses, new_RJD)
                self._kernels.attend_per_row(q_XGD, keys, values, plan.mask_R1W, out_XGD)
            case GatheredBlock():
                both = self._cache.gather(layer, block.page_index, self._buffer)
                keys, values = both.view(2, -1, block.width, size).unbind(0)
                attend = self._kernels.attend_shared if block.is_shared else self._kernels.attend_per_row
                attend(q_XGD, keys, values, plan.mask_R1W, out_XGD)
            case _:
                assert_never(block)
