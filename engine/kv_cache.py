"""Keys and values of all sequences: static memory, in pages. Which page is whose is engine/pages.py's.

Attention reads a sequence's pages by `gather`, which copies them side by side; on a CPU in blocks that stay in its
second-level cache, so that memory is read once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.qwen3 import Qwen3Config

WIDTH_STEP = 32  # gathered tokens are a multiple of it: the kernels' order of summation then is the same at every width


class KvCache:
    """P pages of `page_tokens` tokens, and one more, number P, that padding reads and writes.

    L layers, K key/value heads, D head_dim.
    """

    def __init__(
        self, config: Qwen3Config, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.page_tokens, self.heads, self.size = page_tokens, config.num_kv_heads, config.head_dim
        self.padding_page = pages
        self.page_step = WIDTH_STEP // math.gcd(WIDTH_STEP, page_tokens)
        self.token_bytes = 2 * self.heads * self.size * dtype.itemsize  # of one layer
        shape = (config.num_layers, 2 * self.heads, pages + 1, page_tokens * self.size)
        self.memory = torch.zeros(shape, dtype=dtype, device=device)
        self._pages = [layer.view(-1, page_tokens * self.size) for layer in self.memory]
        self._tokens = [layer.view(-1, self.size) for layer in self.memory]
        heads = torch.arange(2 * self.heads, device=device) * (pages + 1)
        self._first_tokens = heads * page_tokens  # of each key head, then of each value head
        self._all_heads = heads.view(2, 1, self.heads, 1)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def padded_pages(self, tokens: int) -> int:
        """How many pages attention looks at for so many tokens."""
        return -(-self.pages(tokens) // self.page_step) * self.page_step

    def addresses(self, slots_N: Tensor) -> Tensor:
        """Where `write` puts tokens: int64 [N * 2 * K]. A slot is page * page_tokens + place in the page."""
        return (slots_N[:, None] + self._first_tokens).flatten()

    def write(self, layer: int, addresses: Tensor, new_NJD: Tensor) -> None:
        """Keys of the K heads, then their values: J = 2 * K."""
        self._tokens[layer].index_copy_(0, addresses, new_NJD.view(-1, self.size))

    def index(self, tables_RN: Tensor) -> Tensor:
        """What `gather` takes for R block tables of N pages each: int64 [2 * R * K * N]."""
        return (tables_RN[None, :, None] + self._all_heads).flatten()

    def gather(self, layer: int, index: Tensor, buffer: Tensor) -> Tensor:
        """Keys and values [2, R, K, W, D], W = N * page_tokens, copied into `buffer`: any flat tensor of that size."""
        pages = self._pages[layer]
        out = buffer[: index.shape[0] * pages.shape[1]].view(-1, pages.shape[1])
        return torch.index_select(pages, 0, index, out=out)

    def clear(self, pages: list[int]) -> None:
        """After keys or values that are not finite: masked attention would still multiply them by 0."""
        self.memory[:, :, pages] = 0
