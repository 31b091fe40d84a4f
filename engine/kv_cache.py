"""Keys and values of all sequences: one static tensor, one page for each row, running rows first.

Attention in decode reads views of the first rows; so rows move when a sequence comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.qwen3 import Qwen3Config


class KvCache:
    """S rows of P tokens. Shapes: L layers, K key/value heads, D head_dim."""

    def __init__(
        self, config: Qwen3Config, rows: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        heads, size = config.num_kv_heads, config.head_dim
        self.rows, self.page_tokens, self.heads = rows, page_tokens, heads
        shape = (2, config.num_layers, rows, heads, page_tokens, size)
        self._both = torch.zeros(shape, dtype=dtype, device=device)
        both_flat = self._both.view(2, config.num_layers, rows * heads, page_tokens, size)
        self.keys = both_flat[0].unbind(0)  # one [S * K, P, D] for each layer
        self.values = both_flat[1].unbind(0)
        self._head_starts = torch.arange(heads, device=device) * page_tokens

    def addresses(self, rows_N: Tensor, positions_N: Tensor) -> Tensor:
        """Where `write` puts the tokens at these rows and positions: int64 [N * K]."""
        starts = rows_N * (self.heads * self.page_tokens) + positions_N
        return (starts[:, None] + self._head_starts).flatten()

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
