"""Attention over pages: each row is one token's queries, which see their own sequence's keys up to their position.

On a CPU in float32 a row's result is the same, bit for bit, whatever other rows are there and however it came to be
read, in a prompt or one by one: every row is a product of its own, of one shape but for its width, whose padding adds
exact zeros. The kernels keep that promise for two lines at a time, and for widths in steps (engine/kv_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kv_cache import KvCache

GATHERED_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}  # of keys and values of one layer, in one block
ALONE_TOKENS = 32  # a stretch of so many tokens or fewer is read row by row: its pages are gathered for each


class Block(NamedTuple):
    """The rows [first, end), whose pages are gathered together. Either each has its own, or all have the same."""

    first: int
    end: int
    index: Tensor  # of KvCache.gather
    width: int  # gathered tokens
    same: bool


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

    # ------------------------------------------------------------ what they see

    def mask(self, positions_N: Tensor, blocks: Sequence[Block]) -> Tensor:
        """[N, W] of 0 and -inf, W the widest block's."""
        width = max(block.width for block in blocks)
        hidden_NW = self._places[:width] > positions_N[:, None]
        return self._buffer.new_zeros(hidden_NW.shape).masked_fill_(hidden_NW, float("-inf"))

    def __call__(self, layer: int, q_NHD: Tensor, mask_NW: Tensor, blocks: Sequence[Block]) -> Tensor:
        """[M, H * D] for the M <= N rows that the blocks cover, without a gap. Queries are scaled already."""
        count, heads, size = blocks[-1].end, *q_NHD.shape[1:]
        out_NKGD = q_NHD.new_empty((count, heads // self._group, self._group, size))
        q_NKGD = q_NHD[:count].contiguous().view(out_NKGD.shape)
        for block in blocks:
            rows = slice(block.first, block.end)
            both = self._cache.gather(layer, block.index, self._buffer)
            mask_RW = mask_NW[rows, : block.width]
            if block.same:
                self._same(q_NKGD[rows], both, mask_RW, out_NKGD[rows])
            else:
                self._each(q_NKGD[rows], both, mask_RW, out_NKGD[rows])
        return out_NKGD.view(count, -1)

    def _each(self, q_RKGD: Tensor, both: Tensor, mask_RW: Tensor, out_RKGD: Tensor) -> None:
        size, width = q_RKGD.shape[-1], mask_RW.shape[1]
        keys, values = both.view(2, -1, width, size).unbind(0)  # [R * K, W, D]
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
