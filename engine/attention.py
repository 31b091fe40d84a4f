"""Attention over pages: each row is one token's queries, which see their own sequence's keys up to their position.

On a CPU in float32 a row's result is the same, bit for bit, whatever other rows are there and however it came to be
read, in a prompt or one by one: every row is a product of its own, of one shape but for its width, whose padding adds
exact zeros (engine/kernels.py), and widths come in steps (engine/kv_cache.py).

What running sequences see is kept between steps (engine/kept.py); what a prompt sees is gathered for each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kept import Kept, KeptBlocks
from engine.kernels import kernels_for
from engine.kv_cache import KvCache

GATHERED_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}  # of keys and values of one layer, in one block
ALONE_TOKENS = 16  # a stretch of so many tokens or fewer is read row by row: its pages are gathered for each


class Block(NamedTuple):
    """The rows [first, end), which are looked at together. Each has its own pages, or all have the same."""

    first: int
    end: int
    width: int  # tokens that are looked at
    gathered: Tensor | None  # the index of KvCache.gather; None where they are kept
    kept: Kept | None = None
    same: bool = False


class Sight(NamedTuple):
    """What the rows of a block see, for all layers of a pass."""

    mask_R1W: Tensor  # 0 and -inf
    addresses: Tensor | None  # where the new tokens go of rows that are kept


class Attention:
    def __init__(self, cache: KvCache, longest: int) -> None:
        """`longest`: tokens of the longest sequence."""
        self._cache = cache
        memory = cache.memory
        self._kernels = kernels_for(memory.device)
        self.widest_pages = cache.padded_pages(longest)
        widest = self.widest_pages * cache.page_tokens
        limit = GATHERED_BYTES.get(memory.device.type, GATHERED_BYTES["cuda"])
        self._block_tokens = max(limit // cache.token_bytes, widest)
        size = self._block_tokens * 2 * cache.heads * cache.size
        self._buffer = torch.empty(size, dtype=memory.dtype, device=memory.device)
        self._places = torch.arange(widest, device=memory.device)
        self._hidden, self._seen = (self._buffer.new_tensor(value) for value in (float("-inf"), 0.0))
        self._kept = KeptBlocks(cache, self._buffer)

    # ------------------------------------------------------------ which rows go together

    def rows(self, first: int, tokens_R: Sequence[int], tables_RN: Tensor) -> list[Block]:
        """Blocks for the rows from `first` on. `tokens_R`: that each may see, best in order. `tables_RN` is as wide as
        `padded_pages` of the largest."""
        blocks: list[Block] = []
        start = 0
        while start < len(tokens_R):
            end, pages = start, 0
            while end < len(tokens_R):
                wider = max(pages, self._cache.padded_pages(tokens_R[end]))
                if end > start and (end + 1 - start) * wider * self._cache.page_tokens > self._block_tokens:
                    break
                end, pages = end + 1, wider
            index = self._cache.index(tables_RN[start:end, :pages])
            blocks.append(Block(first + start, first + end, pages * self._cache.page_tokens, index))
            start = end
        return blocks

    def stretch(self, first: int, count: int, table_N: Tensor) -> Block:
        """The rows [first, first + count) are one sequence's."""
        width = len(table_N) * self._cache.page_tokens
        return Block(first, first + count, width, self._cache.index(table_N[None]), same=True)

    def arranged(self, names: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """In which order `batch` should get them, as numbers of these."""
        return self._kept.arranged(names, tokens)

    def batch(self, names: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor) -> list[Block]:
        """As `rows`, for those that come again at every step. A name stands for one request of a sequence; where it has
        the row of its block that it had before, nothing is gathered. Tables are as wide as the longest sequence's."""
        blocks: list[Block] = []
        first = 0
        for kept in self._kept.hold(names, tokens_B, tables_BN):
            end = first + kept.num_rows
            width = self._cache.padded_pages(max(tokens_B[first:end])) * self._cache.page_tokens
            blocks.append(Block(first, end, width, None, kept))
            first = end
        return blocks + self.rows(first, tokens_B[first:], tables_BN[first:])

    def clear(self) -> None:
        """After keys or values that are not finite."""
        self._kept.clear()

    # ------------------------------------------------------------ what they see

    def see(self, positions_N: Tensor, blocks: Sequence[Block]) -> list[Sight]:
        """For each block."""
        return [self._see(positions_N[block.first : block.end], block) for block in blocks]

    def _see(self, positions_R: Tensor, block: Block) -> Sight:
        hidden_R1W = self._places[: block.width] > positions_R[:, None, None]
        mask_R1W = torch.where(hidden_R1W, self._hidden, self._seen)
        return Sight(mask_R1W, None if block.kept is None else block.kept.addresses(positions_R))

    def __call__(
        self, layer: int, q_NHD: Tensor, new_NJD: Tensor, sights: Sequence[Sight], blocks: Sequence[Block]
    ) -> Tensor:
        """[M, H * D] for the M <= N rows that the blocks cover, without a gap. Queries are scaled already.

        `new`: the keys and values of the pass, which are in the cache; J = 2 * K. `blocks` are the first of those of
        `sights`.
        """
        count, size, heads = blocks[-1].end, q_NHD.shape[-1], self._cache.heads
        q_XGD = q_NHD[:count].reshape(count * heads, -1, size)
        out_XGD = torch.empty_like(q_XGD)
        for block, sight in zip(blocks, sights, strict=False):
            rows = slice(block.first * heads, block.end * heads)
            q, out = q_XGD[rows], out_XGD[rows]
            if block.kept is not None and sight.addresses is not None:
                keys, values = block.kept.take_in(layer, sight.addresses, new_NJD[block.first : block.end])
                self._kernels.each(q, keys, values, sight.mask_R1W, out)
            elif block.gathered is not None:
                both = self._cache.gather(layer, block.gathered, self._buffer)
                keys, values = both.view(2, -1, block.width, size).unbind(0)
                (self._kernels.same if block.same else self._kernels.each)(q, keys, values, sight.mask_R1W, out)
        return out_XGD.view(count, -1)
