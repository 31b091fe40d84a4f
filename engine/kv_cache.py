"""Keys and values of all sequences: static memory, one page for each row, running rows first.

Attention in decode reads views of the first rows; so rows move when a sequence comes or goes. Its speed is that of
memory, and memory is fast only without gaps: rows therefore lie as close together as the longest of them allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.qwen3 import Qwen3Config

WIDTH_STEP = 32  # tokens by which all rows grow together


class KvCache:
    """S rows of up to P tokens, of which the first W have a place now. L layers, K key/value heads, D head_dim."""

    def __init__(
        self, config: Qwen3Config, rows: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.rows, self.page_tokens = rows, page_tokens
        self.heads, self._size = config.num_kv_heads, config.head_dim
        shape = (2, config.num_layers, rows * self.heads * page_tokens * self._size)
        self._memory = torch.zeros(shape, dtype=dtype, device=device)
        self._head_numbers = torch.arange(self.heads, device=device)
        self._set_width(min(WIDTH_STEP, page_tokens))

    def _set_width(self, width: int) -> None:
        self.width = width
        taken = self._memory[:, :, : self.rows * self.heads * width * self._size]
        self._both = taken.view(2, -1, self.rows, self.heads, width, self._size)
        flat = self._both.view(2, -1, self.rows * self.heads, width, self._size)
        self.keys, self.values = flat[0].unbind(0), flat[1].unbind(0)  # of each layer: [S * K, W, D]

    def fit(self, tokens: int) -> None:
        """Make room for `tokens` <= P in every row, keeping what is there."""
        if tokens <= self.width:
            return
        narrow, old_width = self._both, self.width
        self._set_width(min(-(-tokens // WIDTH_STEP) * WIDTH_STEP, self.page_tokens))
        for layer in range(narrow.shape[1]):  # one by one: the copy in between is small then
            old = narrow[:, layer].clone()
            self._both[:, layer, :, :, :old_width] = old
            self._both[:, layer, :, :, old_width:] = 0  # what lay there might not be finite

    def shrink(self) -> None:
        """Back to the least width, when no row holds anything."""
        self._set_width(min(WIDTH_STEP, self.page_tokens))
        self._both.zero_()

    def addresses(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Where `write` puts the tokens at these rows and positions: int64 [N * K]. Valid until the next `fit`."""
        heads_NK = rows_N[:, None] * self.heads + self._head_numbers
        return (heads_NK * self.width + positions_N[:, None]).flatten()

    def write(self, layer: int, addresses: Tensor, keys_NKD: Tensor, values_NKD: Tensor) -> None:
        size = keys_NKD.shape[-1]
        self.keys[layer].view(-1, size).index_copy_(0, addresses, keys_NKD.reshape(-1, size))
        self.values[layer].view(-1, size).index_copy_(0, addresses, values_NKD.reshape(-1, size))

    def gather(self, layer: int, rows_R: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Copies of the rows' first `tokens` keys and values, each [R, K, tokens, D]."""
        keys, values = self._both[0, layer], self._both[1, layer]
        return keys[rows_R, :, :tokens], values[rows_R, :, :tokens]

    def move(self, to: Sequence[int], source: Sequence[int], tokens: int) -> None:
        """Row source[i] goes to row to[i], all at once; only the first `tokens` of a row are in use."""
        used = self._both[:, :, :, :, :tokens]
        used[:, :, list(to)] = used[:, :, list(source)]

    def clear(self, row: int) -> None:
        """After keys or values that are not finite: masked attention would still multiply them by 0."""
        self._both[:, :, row] = 0
