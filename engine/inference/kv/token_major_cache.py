"""Keys and values of all sequences in the layout that a kernel with block tables reads: [pages, tokens, heads, size].

Unlike the pages of KvCache, these pages are never gathered.
"""

import torch
from torch import Tensor

from asterism.engine.hf.model_config import DecoderConfig


class TokenMajorCache:
    """A cache of P pages of `page_tokens` tokens, and of page P, which padding rows read and write.

    L layers, K key/value heads, D head_dim.
    """

    page_step = 1  # a block table needs no padding

    def __init__(
        self, config: DecoderConfig, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.page_tokens, self.padding_page, self.num_kv_heads = page_tokens, num_pages, config.num_kv_heads
        shape = (config.num_layers, 2, num_pages + 1, page_tokens, config.num_kv_heads, config.head_dim)
        self.memory = torch.zeros(shape, dtype=dtype, device=device)
        self._token_views = [layer.flatten(1, 2).unbind(0) for layer in self.memory]

    def count_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def count_padded_pages(self, tokens: int) -> int:
        return self.count_pages(tokens)

    def compute_addresses(self, slots_N: Tensor) -> Tensor:
        """Return the slots, int64 [N]: `write` needs no other addresses."""
        return slots_N

    def write(self, layer: int, addresses: Tensor, new_NJD: Tensor) -> None:
        """Store keys and values. `new_NJD`: keys of the K heads, then their values; J = 2 * K."""
        for tokens, new_NKD in zip(self._token_views[layer], new_NJD.split(self.num_kv_heads, 1), strict=True):
            tokens.index_copy_(0, addresses, new_NKD)

    def get_pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [P + 1, page_tokens, K, D]."""
        keys, values = self.memory[layer].unbind(0)
        return keys, values

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages with keys or values that are not finite."""
        self.memory[:, :, pages] = 0
