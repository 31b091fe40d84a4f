"""Keys and values of all sequences: static memory in pages, which engine/inference/kv/page_pool.py allocates.

Attention reads a sequence's pages through `gather`, which copies them into contiguous memory. On a CPU the blocks fit
the L2 cache, so that main memory is read once.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from asterism.engine.hf.model_config import DecoderConfig

# The number of gathered tokens is a multiple of WIDTH_STEP: the kernels then sum in the same order at every width.
WIDTH_STEP = 32


class KeyValueCache(Protocol):
    """The interface of KvCache and of asterism.engine.inference.kv.token_major_cache.TokenMajorCache."""

    page_tokens: int
    padding_page: int
    memory: Tensor

    @property
    def page_step(self) -> int:
        """The step of page counts: attention reads a multiple of this many pages of a sequence."""
        ...

    def count_pages(self, tokens: int) -> int: ...

    def count_padded_pages(self, tokens: int) -> int: ...

    def compute_addresses(self, slots_N: Tensor) -> Tensor: ...

    def write(self, layer: int, addresses: Tensor, new_NJD: Tensor) -> None: ...

    def zero_pages(self, pages: list[int]) -> None: ...


class KvCache:
    """A cache of P pages of `page_tokens` tokens, and of page P, which padding rows read and write.

    L layers, K key/value heads, D head_dim.
    """

    def __init__(
        self, config: DecoderConfig, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.page_tokens, self.num_kv_heads, self.head_dim = page_tokens, config.num_kv_heads, config.head_dim
        self.padding_page = num_pages
        self.page_step = WIDTH_STEP // math.gcd(WIDTH_STEP, page_tokens)
        self.token_bytes = 2 * self.num_kv_heads * self.head_dim * dtype.itemsize  # bytes of a token in one layer
        shape = (config.num_layers, 2 * self.num_kv_heads, num_pages + 1, page_tokens * self.head_dim)
        self.memory = torch.zeros(shape, dtype=dtype, device=device)
        self._page_views = [layer.view(-1, page_tokens * self.head_dim) for layer in self.memory]
        self._token_views = [layer.view(-1, self.head_dim) for layer in self.memory]
        heads = torch.arange(2 * self.num_kv_heads, device=device) * (num_pages + 1)
        self._head_token_offsets = heads * page_tokens  # first key heads, then value heads
        self._head_page_offsets = heads.view(2, 1, self.num_kv_heads, 1)

    def count_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def count_padded_pages(self, tokens: int) -> int:
        """Return how many pages attention reads for this many tokens."""
        return -(-self.count_pages(tokens) // self.page_step) * self.page_step

    def compute_addresses(self, slots_N: Tensor) -> Tensor:
        """Return the addresses of these slots, int64 [N * 2 * K]. A slot is page * page_tokens + offset in the page."""
        return (slots_N[:, None] + self._head_token_offsets).flatten()

    def write(self, layer: int, addresses: Tensor, new_NJD: Tensor) -> None:
        """Store keys and values. `new_NJD`: keys of the K heads, then their values; J = 2 * K."""
        self._token_views[layer].index_copy_(0, addresses, new_NJD.view(-1, self.head_dim))

    def build_page_index(self, tables_RN: Tensor) -> Tensor:
        """Return the index of `gather` for R block tables of N pages each: int64 [2 * R * K * N]."""
        return (tables_RN[None, :, None] + self._head_page_offsets).flatten()

    def gather(self, layer: int, index: Tensor, buffer: Tensor) -> Tensor:
        """Copy keys and values, [2, R, K, W, D] with W = N * page_tokens, into `buffer`, a flat tensor."""
        pages = self._page_views[layer]
        out = buffer[: index.shape[0] * pages.shape[1]].view(-1, pages.shape[1])
        return torch.index_select(pages, 0, index, out=out)

    def gather_tokens(self, layer: int, slots_S: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values of S tokens, each [K, S, D], into `buffer`, as `gather` does.

        Each layer computes the addresses again: to keep them would take 8 * 2 * K bytes per token during a pass.
        """
        tokens, addresses = self._token_views[layer], (self._head_token_offsets[:, None] + slots_S).flatten()
        out = torch.index_select(
            tokens, 0, addresses, out=buffer[: len(addresses) * self.head_dim].view(-1, self.head_dim)
        )
        keys_KSD, values_KSD = out.view(2, self.num_kv_heads, -1, self.head_dim).unbind(0)
        return keys_KSD, values_KSD

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages with keys or values that are not finite: masked attention would multiply these by 0."""
        self.memory[:, :, pages] = 0
