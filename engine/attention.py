"""Attention over pages: each row is one token's queries, which see their own sequence's keys up to their position.

On a CPU in float32 a row's result is the same, bit for bit, whatever other rows are there and however it came to be
read, in a prompt or one by one: every row is a product of its own, of one shape but for its width, whose padding adds
exact zeros. The kernels keep that promise for two lines at a time, and for widths in steps (engine/kv_cache.py).

What running sequences see is kept between steps (engine/kept.py); what a prompt sees is gathered for each pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kept import Kept, KeptBlocks
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
    def __init__(self, cache: KvCache, num_heads: int, longest: int) -> None:
        """`longest`: tokens of the longest sequence."""
        self._cache = cache
        self._group = num_heads // cache.heads
        memory = cache.memory
        self._lines = 2 if memory.device.type == "cpu" else self._group
        widest = cache.padded_pages(longest) * cache.page_tokens
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
        count, size = blocks[-1].end, q_NHD.shape[-1]
        q_NGD = q_NHD[:count].reshape(-1, self._group, size)  # N * K
        out_NGD = torch.empty_like(q_NGD)
        for block, sight in zip(blocks, sights, strict=False):
            rows = slice(block.first * self._cache.heads, block.end * self._cache.heads)
            q_RGD, out_RGD = q_NGD[rows], out_NGD[rows]
            if block.kept is not None and sight.addresses is not None:
                fresh_RJD = new_NJD[block.first : block.end]
                seen = block.kept.take_in(layer, sight.addresses, fresh_RJD)
                self._each(q_RGD, seen, sight.mask_R1W, out_RGD)
            elif block.gathered is not None:
                both = self._cache.gather(layer, block.gathered, self._buffer).view(2, -1, block.width, size)
                if block.same:
                    self._same(q_RGD, both, sight.mask_R1W, out_RGD)
                else:
                    self._each(q_RGD, (both[0].transpose(1, 2), both[1]), sight.mask_R1W, out_RGD)
        return out_NGD.view(count, -1)

    def _each(self, q_RGD: Tensor, seen: tuple[Tensor, Tensor], mask_R1W: Tensor, out_RGD: Tensor) -> None:
        """R here and below counts rows times key/value heads."""
        keys_RDW, values_RWD = seen
        for line in range(0, self._group, self._lines):
            lines = slice(line, line + self._lines)
            scores = torch.bmm(q_RGD[:, lines], keys_RDW)
            scores.view(len(mask_R1W), -1, scores.shape[-1]).add_(mask_R1W)
            self._weigh(scores, values_RWD, out_RGD, lines)

    def _same(self, q_RGD: Tensor, both_2KWD: Tensor, mask_S1W: Tensor, out_RGD: Tensor) -> None:
        count, heads = len(mask_S1W), both_2KWD.shape[1]
        q_SKGD, out_SKGD = (part.view(count, heads, *part.shape[1:]) for part in (q_RGD, out_RGD))
        for head in range(heads):
            keys, values = (part.expand(count, -1, -1) for part in both_2KWD[:, head].unbind(0))  # [S, W, D]
            for line in range(0, self._group, self._lines):
                lines = slice(line, line + self._lines)
                scores = torch.bmm(q_SKGD[:, head, lines], keys.transpose(1, 2)).add_(mask_S1W)
                self._weigh(scores, values, out_SKGD[:, head], lines)

    def _weigh(self, scores: Tensor, values: Tensor, out: Tensor, lines: slice) -> None:
        if self._lines >= self._group and out.is_contiguous():
            torch.bmm(scores.softmax(-1), values, out=out)
        else:
            out[:, lines] = torch.bmm(scores.softmax(-1), values)
