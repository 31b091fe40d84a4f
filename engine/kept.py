"""Keys and values of running sequences, gathered side by side and kept between two steps.

To gather the same pages again for every token costs more than attention itself. So what was gathered is kept, and each
new token is written there too. A block holds up to KEPT_ROWS sequences; one that comes takes the place of one that left,
and is all that is gathered. All are looked at as far as the longest of them reaches, so those in a block should be of
like length: see `arranged`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv_cache import KvCache

KEPT_BYTES = 256 << 20  # of gathered keys and values of all layers; beyond it blocks are gathered at every step
KEPT_ROWS = 64  # fewer: more calls for each step; more: the short ones are looked at as far as a longer one reaches
_NOBODY = -1
_SLACK = 8  # a block has room to grow by such a part of its length before it is copied to a wider one


class Kept:
    """One block. A name stands for one request of a sequence."""

    def __init__(self, cache: KvCache, rows: int, width: int, before: Kept | None = None) -> None:
        """Room for so many sequences of so many tokens. It takes over what `before` holds."""
        self._cache, self.rows, self.width = cache, rows, width
        memory = cache.memory
        shape = (2, rows, cache.heads, width, cache.size)
        self._copies = [memory.new_zeros(shape) for _ in memory]  # masked attention multiplies by 0 what lies there
        firsts = torch.arange(2 * rows * cache.heads, device=memory.device).view(2, rows, cache.heads)
        self._firsts = (firsts * self.width).transpose(0, 1).contiguous()  # [R, 2, K], where each head's tokens begin
        self.names: list[int] = []
        self._fresh: list[tuple[slice, Tensor]] = []  # rows that are to be gathered in this pass, with their pages
        self._looks: list[tuple[Tensor, Tensor]] = []
        self._looked_at = (0, 0)
        if before is not None:
            self.names = before.names
            for copy, old in zip(self._copies, before._copies, strict=True):
                common = slice(min(rows, before.rows)), slice(None), slice(min(width, before.width))
                copy[:, *common] = old[:, *common]

    @property
    def num_rows(self) -> int:
        return len(self.names)

    def hold(self, names: Sequence[int], tokens: Sequence[int], tables_RN: Tensor, most_pages: int) -> None:
        """From now on row r is that of names[r]. `tokens`: of each, which fit into `width`. `most_pages` may be gathered
        together."""
        coming = [row for row, name in enumerate(names) if self.names[row : row + 1] != [name]]
        for rows in _runs(coming, [self._cache.pages(count) for count in tokens], most_pages):
            pages = max(self._cache.pages(count) for count in tokens[rows])
            self._fresh.append((rows, self._cache.index(tables_RN[rows, :pages])))
        self.names = list(names)

    def look(self, width: int) -> None:
        """`take_in` returns all rows that are held, so many tokens of each."""
        if self._looked_at != (self.num_rows, width):
            self._looked_at = (self.num_rows, width)
            self._looks = [_look(copy[:, : self.num_rows], width) for copy in self._copies]

    def addresses(self, positions_R: Tensor) -> Tensor:
        """Where `take_in` puts the tokens at these positions: int64 [R * 2 * K]."""
        return (self._firsts[: len(positions_R)] + positions_R[:, None, None]).flatten()

    def take_in(self, layer: int, addresses: Tensor, new_RJD: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens; gather rows that are new here, whose tokens are in the cache. Keys and values:
        [R * K, D, W] and [R * K, W, D]."""
        copy, size = self._copies[layer], self._cache.size
        copy.view(-1, size).index_copy_(0, addresses, new_RJD.view(-1, size))
        for rows, index in self._fresh:
            pages = self._cache.gather(layer, index, buffer).view(2, rows.stop - rows.start, copy.shape[2], -1, size)
            copy[:, rows, :, : pages.shape[3]] = pages
        if layer == len(self._copies) - 1:
            self._fresh.clear()
        return self._looks[layer]


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


def _look(copy_2RKWD: Tensor, width: int) -> tuple[Tensor, Tensor]:
    keys, values = (part.flatten(0, 1)[:, :width] for part in copy_2RKWD.unbind(0))
    return keys.transpose(1, 2), values


class KeptBlocks:
    """The blocks of all that run, as far as KEPT_BYTES allow."""

    def __init__(self, cache: KvCache, most_pages: int) -> None:
        """`most_pages` may be gathered together."""
        self._cache, self._most_pages = cache, most_pages
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
            left -= self._num_bytes(block.rows, block.width)
            block.hold(names[rows], tokens_B[rows], tables_BN[rows], self._most_pages)
            held.append(block)
        spare = self._blocks[len(held) : len(held) + 1]  # so that its memory is there when the batch grows again
        for block in spare:
            block.names = []  # it misses the tokens of its sequences from now on
        self._blocks = [*held, *(block for block in spare if self._num_bytes(block.rows, block.width) <= left)]
        return held

    def clear(self) -> None:
        """After keys or values that are not finite."""
        self._blocks.clear()

    def _block(self, number: int, count: int, tokens: int, limit: int) -> Kept | None:
        """With room for so many rows of so many tokens; None where that is beyond the limit."""
        before = self._blocks[number] if number < len(self._blocks) else None
        rows = min(KEPT_ROWS, 1 << (count - 1).bit_length())
        width = self._cache.padded_pages(tokens + tokens // _SLACK) * self._cache.page_tokens
        if before is not None:
            rows = max(rows, before.rows)
            if before.rows >= count and before.width >= tokens:
                width = before.width
        if self._num_bytes(rows, width) > limit:
            return None
        if before is not None and (before.rows, before.width) == (rows, width):
            return before
        return Kept(self._cache, rows, width, before)

    def _num_bytes(self, rows: int, width: int) -> int:
        return rows * width * self._cache.token_bytes * len(self._cache.memory)


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
