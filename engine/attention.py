"""Attention over pages: each row is one token's queries, which see their own sequence's keys up to their position.

On a CPU in float32 a row's result is the same, bit for bit, whatever other rows are there and however it came to be
read, in a prompt or one by one: every row is a product of its own, of one shape but for its width, whose padding adds
exact zeros. The kernels keep that promise for two lines at a time, and for widths in steps (engine/kv_cache.py).

To gather the same pages again for every token costs more than attention itself (on one core 1.5 ms of a step of 4 ms,
64 sequences of the tiny model). So what was gathered for running sequences is kept, as far as KEPT_BYTES allow, and
each new token is written there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kv_cache import KvCache

GATHERED_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}  # of keys and values of one layer, in one block
KEPT_BYTES = 256 << 20  # of gathered keys and values of all layers; beyond it blocks are gathered at every step
KEPT_ROWS = 64  # in one block that is kept: it is gathered anew when one of them comes or goes
ALONE_TOKENS = 16  # a stretch of so many tokens or fewer is read row by row: its pages are gathered for each


class Kept:
    """Keys and values of some running sequences, gathered, and how long they stay valid."""

    def __init__(self, rows: tuple[int, ...], width: int, copies: list[Tensor]) -> None:
        self.rows, self.width, self.copies = rows, width, copies
        self.filled = False  # the first pass gathers, layer by layer, after its own tokens are written

    @property
    def num_bytes(self) -> int:
        return sum(copy.numel() * copy.itemsize for copy in self.copies)


class Block(NamedTuple):
    """The rows [first, end), whose pages are gathered together. Either each has its own, or all have the same."""

    first: int
    end: int
    gathered: Tensor  # the index of KvCache.gather
    width: int  # gathered tokens that are looked at
    same: bool = False
    kept: Kept | None = None


class Sight(NamedTuple):
    """What the rows of a pass see, for all layers."""

    mask_NW: Tensor  # 0 and -inf, W the widest block's
    addresses: list[Tensor | None]  # for each block with filled copies: where its rows' new tokens go


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
        self._kept: list[Kept] = []

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
            blocks.append(Block(first + start, first + end, index, pages * self._cache.page_tokens, same=False))
            start = end
        return blocks

    def stretch(self, first: int, count: int, table_N: Tensor) -> Block:
        """The rows [first, first + count) are one sequence's."""
        width = len(table_N) * self._cache.page_tokens
        return Block(first, first + count, self._cache.index(table_N[None]), width, same=True)

    def batch(self, names: Sequence[int], tokens_B: Sequence[int], tables_BN: Tensor) -> list[Block]:
        """As `rows`, for those that come again at every step. A name stands for one request of a sequence; where all
        names of a block are as before, it goes on with what it has. Tables are as wide as the longest sequence's."""
        blocks: list[Block] = []
        before, self._kept, left = self._kept, [], KEPT_BYTES
        for number, first in enumerate(range(0, len(names), KEPT_ROWS)):
            rows = slice(first, first + KEPT_ROWS)
            old = before[number] if number < len(before) else None
            kept = self._keep(tuple(names[rows]), max(tokens_B[rows]), old, left)
            if kept is None:
                return blocks + self.rows(first, tokens_B[first:], tables_BN[first:])
            left -= kept.num_bytes
            index = self._cache.index(tables_BN[rows, : kept.width // self._cache.page_tokens])
            width = self._cache.padded_pages(max(tokens_B[rows])) * self._cache.page_tokens
            blocks.append(Block(first, first + len(kept.rows), index, width, kept=kept))
            self._kept.append(kept)
        return blocks

    def _keep(self, names: tuple[int, ...], tokens: int, old: Kept | None, limit: int) -> Kept | None:
        if old is not None and old.rows == names and tokens <= old.width:
            return old
        cache, memory = self._cache, self._cache.memory
        pages = cache.padded_pages(tokens)
        size = len(names) * pages * cache.page_tokens * 2 * cache.heads * cache.size
        copies = [] if old is None else old.copies
        if not copies or copies[0].numel() < size:
            if len(memory) * size * memory.itemsize > limit:
                return None
            copies = [torch.empty(size, dtype=memory.dtype, device=memory.device) for _ in memory]
        return Kept(names, pages * cache.page_tokens, copies)

    # ------------------------------------------------------------ what they see

    def see(self, positions_N: Tensor, blocks: Sequence[Block]) -> Sight:
        width = max(block.width for block in blocks)
        hidden_NW = self._places[:width] > positions_N[:, None]
        mask_NW = torch.zeros(hidden_NW.shape, dtype=self._buffer.dtype, device=positions_N.device)
        addresses = [self._addresses(positions_N, block) for block in blocks]
        return Sight(mask_NW.masked_fill_(hidden_NW, float("-inf")), addresses)

    def _addresses(self, positions_N: Tensor, block: Block) -> Tensor | None:
        """In copies of [2, R, K, W, D]: for every row and head, keys' and then values'."""
        if block.kept is None or not block.kept.filled:
            return None
        starts = torch.arange(2 * (block.end - block.first) * self._cache.heads, device=positions_N.device)
        positions_RK = positions_N[block.first : block.end, None].expand(-1, self._cache.heads).flatten()
        return starts * block.kept.width + positions_RK.repeat(2)

    def __call__(
        self, layer: int, q_NHD: Tensor, new_2NKD: tuple[Tensor, Tensor], sight: Sight, blocks: Sequence[Block]
    ) -> Tensor:
        """[M, H * D] for the M <= N rows that the blocks cover, without a gap. Queries are scaled already.

        `new`: the keys and values of the pass, which are in the cache. `blocks` are the first of those of `sight`.
        """
        count, heads, size = blocks[-1].end, *q_NHD.shape[1:]
        out_NKGD = q_NHD.new_empty((count, heads // self._group, self._group, size))
        q_NKGD = q_NHD[:count].contiguous().view(out_NKGD.shape)
        for block, addresses in zip(blocks, sight.addresses, strict=False):
            rows = slice(block.first, block.end)
            both = self._gathered(layer, block, addresses, new_2NKD)
            attend = self._same if block.same else self._each
            attend(q_NKGD[rows], both, sight.mask_NW[rows, : block.width], out_NKGD[rows])
        return out_NKGD.view(count, -1)

    def _gathered(self, layer: int, block: Block, addresses: Tensor | None, new: tuple[Tensor, Tensor]) -> Tensor:
        """[2, R, K, W, D], flat; R is 1 where all rows have the same."""
        if block.kept is None:
            return self._cache.gather(layer, block.gathered, self._buffer)
        copy = block.kept.copies[layer]
        if addresses is None:
            block.kept.filled = layer == len(block.kept.copies) - 1
            return self._cache.gather(layer, block.gathered, copy)
        both = copy[: block.gathered.shape[0] * self._cache.page_tokens * self._cache.size]
        fresh = torch.stack([part[block.first : block.end] for part in new])
        both.view(-1, self._cache.size).index_copy_(0, addresses, fresh.view(-1, self._cache.size))
        return both

    def _each(self, q_RKGD: Tensor, both: Tensor, mask_RW: Tensor, out_RKGD: Tensor) -> None:
        size, width = q_RKGD.shape[-1], mask_RW.shape[1]
        num_heads = len(q_RKGD) * self._cache.heads
        keys, values = both.view(2, num_heads, -1, size)[:, :, :width].unbind(0)  # [R * K, W, D]
        queries, out = q_RKGD.view(-1, self._group, size), out_RKGD.view(-1, self._group, size)
        for line in range(0, self._group, self._lines):
            lines = slice(line, line + self._lines)
            scores = torch.bmm(queries[:, lines], keys.transpose(1, 2))
            scores.view(len(mask_RW), -1, width).add_(mask_RW[:, None])
            self._weigh(scores, values, out, lines)

    def _same(self, q_SKGD: Tensor, both: Tensor, mask_SW: Tensor, out_SKGD: Tensor) -> None:
        size, (count, width) = q_SKGD.shape[-1], mask_SW.shape
        keys, values = both.view(2, -1, 1, width, size).expand(-1, -1, count, -1, -1).unbind(0)  # [K, S, W, D]
        for head in range(keys.shape[0]):
            for line in range(0, self._group, self._lines):
                lines = slice(line, line + self._lines)
                scores = torch.bmm(q_SKGD[:, head, lines], keys[head].transpose(1, 2)).add_(mask_SW[:, None])
                self._weigh(scores, values[head], out_SKGD[:, head], lines)

    def _weigh(self, scores: Tensor, values: Tensor, out: Tensor, lines: slice) -> None:
        if self._lines >= self._group and out.is_contiguous():
            torch.bmm(scores.softmax(-1), values, out=out)
        else:
            out[:, lines] = torch.bmm(scores.softmax(-1), values)
