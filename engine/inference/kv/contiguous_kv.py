"""Contiguous copies of the running sequences' keys and values, kept between steps.

To gather the same pages for every token takes longer than attention itself. So gathered rows are kept, and each new
token is also written into its row. A block holds up to DENSE_BLOCK_ROWS sequences; a joining sequence takes a free row,
and only its pages are gathered. Attention reads every row of a block up to the block's longest sequence, so the
sequences of a block should have similar lengths: see `order_by_length`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from asterism.engine.inference.buffer_sizes import DENSE_CACHE_BYTES
from asterism.engine.inference.kv.kv_cache import KvCache

# Smaller blocks need more calls per step; in larger blocks attention reads more padding of short sequences.
DENSE_BLOCK_ROWS = 64
_EMPTY = -1
_GROWTH_DIVISOR = 8  # a new block has room for 1/8 more tokens per row
_MAX_EXTRA_WIDTH_STEPS = 2  # padding steps by which the stride can exceed the width that attention reads


class DenseKvBlock:
    """A block of `max_rows` rows of up to `max_tokens` tokens. A join id identifies one request of a sequence.

    Heads are `width` tokens apart, which is little more than attention reads: the processor prefetches memory behind
    its reads, and a wide gap between heads would waste this.
    """

    def __init__(
        self, cache: KvCache, max_rows: int, max_tokens: int, buffer: Tensor, previous: DenseKvBlock | None = None
    ) -> None:
        """Copy the rows of `previous` into a new block. `buffer`: scratch memory, shared between calls."""
        self._cache, self.max_rows, self.max_tokens, self._buffer = cache, max_rows, max_tokens, buffer
        memory, self._num_heads = cache.memory, 2 * max_rows * cache.num_kv_heads
        size = self._num_heads * max_tokens * cache.head_dim
        self._storage = [
            memory.new_zeros(size) for _ in memory
        ]  # zeros: masked attention multiplies unused memory by 0
        self._head_numbers = torch.arange(self._num_heads, device=memory.device).view(2, max_rows, cache.num_kv_heads)
        self.join_ids: list[int] = []
        self._pending_gathers: list[tuple[slice, Tensor]] = []  # rows to gather in this pass, each with its page index
        self._views: list[tuple[Tensor, Tensor]] = []
        self._lay_out(0 if previous is None else min(max_tokens, previous.width))
        if previous is not None:
            self.join_ids, common = (
                previous.join_ids,
                (slice(min(max_rows, previous.max_rows)), slice(None), slice(self.width)),
            )
            for copy, old in zip(self._dense_layers, previous._dense_layers, strict=True):
                copy[:, *common] = old[:, *common]

    @property
    def num_rows(self) -> int:
        return len(self.join_ids)

    def restride(self, width: int) -> None:
        """Move the heads to be `width` tokens apart."""
        before, old = self.width, [copy.view(self._num_heads, -1) for copy in self._dense_layers]
        self._lay_out(width)
        tokens = min(before, width)
        heads_per_copy = self._buffer.numel() // max(1, tokens * self._cache.head_dim)
        starts = range(0, self._num_heads, heads_per_copy)
        starts = starts if width < before else starts[::-1]  # this order overwrites no head before its copy
        for source, copy in zip(old, self._dense_layers, strict=True):
            target = copy.view(self._num_heads, -1)
            for start in starts:
                heads = slice(start, start + heads_per_copy)
                part = source[heads, : tokens * self._cache.head_dim]
                staged = self._buffer[: part.numel()].view(part.shape)
                target[heads, : part.shape[1]] = staged.copy_(part)

    def assign_rows(self, join_ids: Sequence[int], tokens: Sequence[int], tables_RN: Tensor) -> None:
        """Give row r to join_ids[r], which has tokens[r] <= width tokens."""
        max_pages = self._buffer.numel() // (
            2 * self._cache.num_kv_heads * self._cache.page_tokens * self._cache.head_dim
        )
        new_rows = [row for row, join_id in enumerate(join_ids) if self.join_ids[row : row + 1] != [join_id]]
        for rows in _group_adjacent_rows(new_rows, [self._cache.count_pages(count) for count in tokens], max_pages):
            pages = max(self._cache.count_pages(count) for count in tokens[rows])
            self._pending_gathers.append((rows, self._cache.build_page_index(tables_RN[rows, :pages])))
        self.join_ids = list(join_ids)

    def view_width(self, width: int) -> None:
        """Make `update` return the first `width` tokens of all rows in use."""
        views = (copy[:, : self.num_rows, :, :width].flatten(1, 2).unbind(0) for copy in self._dense_layers)
        self._views = [(keys, values) for keys, values in views]

    def compute_addresses(self, positions_R: Tensor) -> Tensor:
        """Return the addresses at which `update` writes the tokens at these positions: int64 [R * 2 * K]."""
        return (self._head_offsets[: len(positions_R)] + positions_R[:, None, None]).flatten()

    def update(self, layer: int, addresses: Tensor, new_RJD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens, and gather the rows of joined sequences from the cache.

        Returns keys and values, each [R * K, W, D].
        """
        copy, size = self._dense_layers[layer], self._cache.head_dim
        copy.view(-1, size).index_copy_(0, addresses, new_RJD.view(-1, size))
        for rows, index in self._pending_gathers:
            pages = self._cache.gather(layer, index, self._buffer).view(
                2, rows.stop - rows.start, copy.shape[2], -1, size
            )
            copy[:, rows, :, : pages.shape[3]] = pages
        if layer == len(self._dense_layers) - 1:
            self._pending_gathers.clear()
        return self._views[layer]

    def _lay_out(self, width: int) -> None:
        self.width = width
        shape = (2, self.max_rows, self._cache.num_kv_heads, width, self._cache.head_dim)
        self._dense_layers = [memory[: math.prod(shape)].view(shape) for memory in self._storage]
        # [R, 2, K], the first token of each head
        self._head_offsets = (self._head_numbers * width).transpose(0, 1).contiguous()


def _group_adjacent_rows(rows: Sequence[int], pages: Sequence[int], max_pages: int) -> list[slice]:
    """Group adjacent rows. In a slice of several rows, rows * pages of the longest row is at most `max_pages`."""
    runs: list[slice] = []
    max_row_pages = 0
    for row in rows:
        max_row_pages = max(max_row_pages, pages[row])
        if runs and runs[-1].stop == row and (row + 1 - runs[-1].start) * max_row_pages <= max_pages:
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
            max_row_pages = pages[row]
    return runs


class DenseKvCache:
    """The blocks of the running sequences, up to DENSE_CACHE_BYTES."""

    def __init__(self, cache: KvCache, buffer: Tensor) -> None:
        """`buffer`: scratch memory, shared between calls, with room for the longest sequence."""
        self._cache, self._buffer = cache, buffer
        self._blocks: list[DenseKvBlock] = []

    def order_by_length(self, join_ids: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Return the order in which to run the sequences, as indices into the arguments.

        The shortest sequences come first, DENSE_BLOCK_ROWS per block; within its block a sequence keeps its row. All
        sequences grow by one token per step, so their order is stable. A sequence that joins or leaves moves one
        sequence across each later block border.
        """
        by_length = sorted(range(len(join_ids)), key=lambda number: (tokens[number], join_ids[number]))
        order: list[int] = []
        for number, first in enumerate(range(0, len(join_ids), DENSE_BLOCK_ROWS)):
            members = by_length[first : first + DENSE_BLOCK_ROWS]
            before = self._blocks[number].join_ids if number < len(self._blocks) else ()
            order += _keep_existing_rows(before, members, join_ids)
        return order

    def assign_blocks(self, join_ids: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor) -> list[DenseKvBlock]:
        """Return blocks of DENSE_BLOCK_ROWS sequences in this order, up to DENSE_CACHE_BYTES, until the next call."""
        blocks: list[DenseKvBlock] = []
        bytes_left = DENSE_CACHE_BYTES
        for first in range(0, len(join_ids), DENSE_BLOCK_ROWS):
            rows = slice(first, first + DENSE_BLOCK_ROWS)
            block = self._get_or_create_block(len(blocks), len(join_ids[rows]), max(tokens_B[rows]), bytes_left)
            if block is None:
                break
            bytes_left -= self._count_bytes(block.max_rows, block.max_tokens)
            block.assign_rows(join_ids[rows], tokens_B[rows], tables_BN[rows])
            self._set_width(block, max(tokens_B[rows]))
            blocks.append(block)
        spare = self._blocks[len(blocks) : len(blocks) + 1]  # one block is kept, because the batch can grow again
        for block in spare:
            block.join_ids = []  # the block misses later tokens of its sequences
        self._blocks = [
            *blocks,
            *(block for block in spare if self._count_bytes(block.max_rows, block.max_tokens) <= bytes_left),
        ]
        return blocks

    def clear(self) -> None:
        """Drop all blocks, because keys or values are not finite."""
        self._blocks.clear()

    def _get_or_create_block(self, index: int, num_rows: int, tokens: int, max_bytes: int) -> DenseKvBlock | None:
        """Return a block with room for these rows and tokens, or None if the block would exceed `max_bytes`."""
        previous = self._blocks[index] if index < len(self._blocks) else None
        max_rows = min(DENSE_BLOCK_ROWS, 1 << (num_rows - 1).bit_length())
        max_tokens = self._pad_tokens(tokens + tokens // _GROWTH_DIVISOR)
        if previous is not None:
            max_rows = max(max_rows, previous.max_rows)
            if previous.max_rows >= num_rows and previous.max_tokens >= tokens:
                max_tokens = previous.max_tokens
        if self._count_bytes(max_rows, max_tokens) > max_bytes:
            return None
        if previous is not None and (previous.max_rows, previous.max_tokens) == (max_rows, max_tokens):
            return previous
        return DenseKvBlock(self._cache, max_rows, max_tokens, self._buffer, previous)

    def _set_width(self, block: DenseKvBlock, tokens: int) -> None:
        width = self._pad_tokens(tokens)
        max_extra_width = self._pad_tokens(1) * _MAX_EXTRA_WIDTH_STEPS
        if not width <= block.width <= width + max_extra_width:
            block.restride(width)
        block.view_width(width)

    def _pad_tokens(self, tokens: int) -> int:
        return self._cache.count_padded_pages(tokens) * self._cache.page_tokens

    def _count_bytes(self, max_rows: int, max_tokens: int) -> int:
        return max_rows * max_tokens * self._cache.token_bytes * len(self._cache.memory)


def _keep_existing_rows(previous_ids: Sequence[int], members: Sequence[int], join_ids: Sequence[int]) -> list[int]:
    """Return members (indices into `join_ids`) by row: a member keeps its previous row, new members fill the gaps."""
    row_by_id = {join_id: row for row, join_id in enumerate(previous_ids[: len(members)])}
    rows: list[int] = [_EMPTY] * len(members)
    new_numbers: list[int] = []
    for number in members:
        row = row_by_id.get(join_ids[number])
        if row is None:
            new_numbers.append(number)
        else:
            rows[row] = number
    new_iterator = iter(new_numbers)
    return [next(new_iterator) if number == _EMPTY else number for number in rows]
