"""Keys and values of running sequences, gathered side by side and kept between two steps.

To gather the same pages again for every token costs more than attention itself. So what was gathered is kept, and each
new token is written there too. A block holds up to KEPT_ROWS sequences; one that comes takes the place of one that left,
and is all that is gathered. All are looked at as far as the longest of them reaches, so those in a block should be of
like length: see `arranged`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv_cache import KvCache

KEPT_BYTES = 256 << 20  # of gathered keys and values of all layers; beyond it blocks are gathered at every step
KEPT_ROWS = 64  # fewer: more calls for each step; more: the short ones are looked at as far as a longer one reaches
_NOBODY = -1
_SLACK = 8  # a block has room to grow by such a part of its length before it is copied to a wider one
_LOOSE = 2  # steps of width that a block may lie wider than it is looked at, before it is drawn together


class Kept:
    """One block, of so many `rows` with room for `room` tokens each. A name stands for one request of a sequence.

    Heads lie `width` tokens apart, which is as many as are looked at, or little more: a processor fetches ahead of what
    it reads, and what lies between would be fetched for nothing.
    """

    def __init__(self, cache: KvCache, rows: int, room: int, buffer: Tensor, before: Kept | None = None) -> None:
        """`buffer`: memory that others use between two calls. It takes over what `before` holds."""
        self._cache, self.rows, self.room, self._buffer = cache, rows, room, buffer
        memory, self._num_heads = cache.memory, 2 * rows * cache.heads
        size = self._num_heads * room * cache.size
        self._memory = [memory.new_zeros(size) for _ in memory]  # masked attention multiplies by 0 what lies there
        self._numbers = torch.arange(self._num_heads, device=memory.device).view(2, rows, cache.heads)
        self.names: list[int] = []
        self._fresh: list[tuple[slice, Tensor]] = []  # rows that are to be gathered in this pass, with their pages
        self._looks: list[tuple[Tensor, Tensor]] = []
        self._lay_out(0 if before is None else min(room, before.width))
        if before is not None:
            self.names, common = before.names, (slice(min(rows, before.rows)), slice(None), slice(self.width))
            for copy, old in zip(self._copies, before._copies, strict=True):
                copy[:, *common] = old[:, *common]

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def spread(self, width: int) -> None:
        """Heads lie so many tokens apart from now on."""
        before, old = self.width, [copy.view(self._num_heads, -1) for copy in self._copies]
        self._lay_out(width)
        tokens = min(before, width)
        together = self._buffer.numel() // max(1, tokens * self._cache.size)
        starts = range(0, self._num_heads, together)
        starts = starts if width < before else starts[::-1]  # none is written over before it is read
        for source, copy in zip(old, self._copies, strict=True):
            target = copy.view(self._num_heads, -1)
            for start in starts:
                heads = slice(start, start + together)
                part = source[heads, : tokens * self._cache.size]
                aside = self._buffer[: part.numel()].view(part.shape)
                target[heads, : part.shape[1]] = aside.copy_(part)

    def hold(self, names: Sequence[int], tokens: Sequence[int], tables_RN: Tensor) -> None:
        """From now on row r is that of names[r]. `tokens`: of each, which fit into `width`."""
        most_pages = self._buffer.numel() // (2 * self._cache.heads * self._cache.page_tokens * self._cache.size)
        coming = [row for row, name in enumerate(names) if self.names[row : row + 1] != [name]]
        for rows in _runs(coming, [self._cache.pages(count) for count in tokens], most_pages):
            pages = max(self._cache.pages(count) for count in tokens[rows])
            self._fresh.append((rows, self._cache.index(tables_RN[rows, :pages])))
        self.names = list(names)

    def look(self, width: int) -> None:
        """`take_in` returns all rows that are held, so many tokens of each."""
        looks = (copy[:, : self.num_rows, :, :width].flatten(1, 2).unbind(0) for copy in self._copies)
        self._looks = [(keys, values) for keys, values in looks]

    def addresses(self, positions_R: Tensor) -> Tensor:
        """Where `take_in` puts the tokens at these positions: int64 [R * 2 * K]."""
        return (self._firsts[: len(positions_R)] + positions_R[:, None, None]).flatten()

    def take_in(self, layer: int, addresses: Tensor, new_RJD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; gather rows that are new here, whose tokens are in the cache. Keys and values:
        [R * K, W, D]."""
        copy, size = self._copies[layer], self._cache.size
        copy.view(-1, size).index_copy_(0, addresses, new_RJD.view(-1, size))
        for rows, index in self._fresh:
            pages = self._cache.gather(layer, index, self._buffer).view(
                2, rows.stop - rows.start, copy.shape[2], -1, size
            )
            copy[:, rows, :, : pages.shape[3]] = pages
        if layer == len(self._copies) - 1:
            self._fresh.clear()
        return self._looks[layer]

    def _lay_out(self, width: int) -> None:
        self.width = width
        shape = (2, self.rows, self._cache.heads, width, self._cache.size)
        self._copies = [memory[: math.prod(shape)].view(shape) for memory in self._memory]
        self._firsts = (self._numbers * width).transpose(0, 1).contiguous()  # [R, 2, K], where each head's tokens begin


def _runs(rows: Sequence[int], pages: Sequence[int], most_pages: int) -> list[slice]:
    """Neighbours together, as far as their pages, all as many as the most of any, are no more than that."""
    runs: list[slice] = []
    widest = 0
    for row in rows:
        widest = max(widest, pages[row])
        if runs and runs[-1].stop == row and (row + 1 - runs[-1].start) * widest <= most_pages:
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
            widest = pages[row]
    return runs


class KeptBlocks:
    """The blocks of all that run, as far as KEPT_BYTES allow."""

    def __init__(self, cache: KvCache, buffer: Tensor) -> None:
        """`buffer`: memory that others use between two calls, with room for the longest sequence."""
        self._cache, self._buffer = cache, buffer
        self._blocks: list[Kept] = []

    def arranged(self, names: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """In which order to run them, as numbers of these: the shortest first, KEPT_ROWS a block, each in the row of its
        block that it has already.

        All grow by a token a step, so that their order stays; one that comes or goes moves one across each border behind.
        """
        by_length = sorted(range(len(names)), key=lambda number: (tokens[number], names[number]))
        order: list[int] = []
        for number, first in enumerate(range(0, len(names), KEPT_ROWS)):
            members = by_length[first : first + KEPT_ROWS]
            before = self._blocks[number].names if number < len(self._blocks) else ()
            order += _in_place(before, members, names)
        return order

    def hold(self, names: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor) -> list[Kept]:
        """Blocks of them in this order, KEPT_ROWS each, as far as KEPT_BYTES allow: for the passes until the next call."""
        held: list[Kept] = []
        left = KEPT_BYTES
        for first in range(0, len(names), KEPT_ROWS):
            rows = slice(first, first + KEPT_ROWS)
            block = self._block(len(held), len(names[rows]), max(tokens_B[rows]), left)
            if block is None:
                break
            left -= self._num_bytes(block.rows, block.room)
            block.hold(names[rows], tokens_B[rows], tables_BN[rows])
            self._set_width(block, max(tokens_B[rows]))
            held.append(block)
        spare = self._blocks[len(held) : len(held) + 1]  # so that its memory is there when the batch grows again
        for block in spare:
            block.names = []  # it misses the tokens of its sequences from now on
        self._blocks = [*held, *(block for block in spare if self._num_bytes(block.rows, block.room) <= left)]
        return held

    def clear(self) -> None:
        """After keys or values that are not finite."""
        self._blocks.clear()

    def _block(self, number: int, count: int, tokens: int, limit: int) -> Kept | None:
        """With room for so many rows of so many tokens; None where that is beyond the limit."""
        before = self._blocks[number] if number < len(self._blocks) else None
        rows = min(KEPT_ROWS, 1 << (count - 1).bit_length())
        room = self._padded(tokens + tokens // _SLACK)
        if before is not None:
            rows = max(rows, before.rows)
            if before.rows >= count and before.room >= tokens:
                room = before.room
        if self._num_bytes(rows, room) > limit:
            return None
        if before is not None and (before.rows, before.room) == (rows, room):
            return before
        return Kept(self._cache, rows, room, self._buffer, before)

    def _set_width(self, block: Kept, tokens: int) -> None:
        width = self._padded(tokens)
        loose = self._padded(1) * _LOOSE
        if not width <= block.width <= width + loose:
            block.spread(width)
        block.look(width)

    def _padded(self, tokens: int) -> int:
        return self._cache.padded_pages(tokens) * self._cache.page_tokens

    def _num_bytes(self, rows: int, room: int) -> int:
        return rows * room * self._cache.token_bytes * len(self._cache.memory)


def _in_place(before: Sequence[int], members: Sequence[int], names: Sequence[int]) -> list[int]:
    row_of = {name: row for row, name in enumerate(before[: len(members)])}
    rows: list[int] = [_NOBODY] * len(members)
    coming: list[int] = []
    for number in members:
        row = row_of.get(names[number])
        if row is None:
            coming.append(number)
        else:
            rows[row] = number
    newcomers = iter(coming)
    return [next(newcomers) if number == _NOBODY else number for number in rows]
