"""Whether this machine computes a token with the same bits whatever other tokens are computed beside it.

No library promises it, so an engine that has to (`determinism = "strict"`) tries its products in all the numbers of rows
that a pass may have, and attention at several widths, before it begins. Products that fail are taken in tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.errors import UnusableInput
from engine.decoder import MIN_ROWS
from engine.kernels import Kernels
from engine.kv_cache import WIDTH_STEP
from engine.products import WHOLE, Products, tiled
from engine.qwen3 import Qwen3Config

TILES = (64, 16, MIN_ROWS)  # rows; the first that keeps all bits is taken
ALL_COUNTS_TO = 40  # rows; beyond it those around the powers of two are tried
WIDEST = 4096  # tokens, that attention is tried over
_ROWS = 5  # beside each other, in attention's trial


class RowsDepend(UnusableInput):
    """On this machine a token's bits depend on the others in its batch."""


def products_that_keep_rows(
    config: Qwen3Config, most_rows: int, most_wanted: int, candidates: Sequence[Products] = ()
) -> Products:
    """The first of the candidates that gives each row the same bits in passes of up to `most_rows`, of which logits are
    wanted of up to `most_wanted`. Raises RowsDepend."""
    shapes = [*_layer_shapes(config), (config.hidden_size, config.vocab_size)]
    limits = [most_rows] * (len(shapes) - 1) + [most_wanted]
    for products in candidates or (WHOLE, *map(tiled, TILES)):
        if all(_keeps_rows(products, *shape, limit) for shape, limit in zip(shapes, limits, strict=True)):
            return products
    raise RowsDepend(_refusal("matrix products"))


def check_attention(kernels: Kernels, config: Qwen3Config, longest: int) -> None:
    """Raises RowsDepend."""
    if not attention_keeps_rows(kernels, config, longest):
        raise RowsDepend(_refusal("attention"))


def _refusal(what: str) -> str:
    version = torch.__version__
    return (
        f'determinism is "strict", and on this machine torch {version} computes {what} in ways that depend on the batch'
    )


# ---------------------------------------------------------------- products


def _layer_shapes(config: Qwen3Config) -> list[tuple[int, int]]:
    """[in, out] of the decoder's fused matrices."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [(width, queries + 2 * keys), (queries, width), (width, 2 * inner), (inner, width)]


def _keeps_rows(products: Products, size_in: int, size_out: int, most_rows: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights_KF = torch.randn(size_in, size_out, generator=generator)
    most_rows = max(most_rows, MIN_ROWS)
    x_NK = torch.randn(most_rows + 1, size_in, generator=generator)
    to_NF = torch.randn(most_rows + 1, size_out, generator=generator)
    return _is_alike(lambda rows: products.plain(x_NK[rows], weights_KF), most_rows) and _is_alike(
        lambda rows: products.added(to_NF[rows], x_NK[rows], weights_KF), most_rows
    )


def _is_alike(product: Callable[[slice], Tensor], most_rows: int) -> bool:
    """Whether all rows are as they are by fours, in other numbers of them and one place further. There is one row more."""
    starts = range(0, most_rows - MIN_ROWS + 1, MIN_ROWS)
    expected_NF = product(slice(most_rows + 1))
    fours = (slice(start, start + MIN_ROWS) for start in starts)
    if not all(torch.equal(product(rows), expected_NF[rows]) for rows in fours):
        return False
    for count in _counts(most_rows):
        for first in range(2 if count <= ALL_COUNTS_TO else 1):
            rows = slice(first, first + count)
            if not torch.equal(product(rows), expected_NF[rows]):
                return False
    return True


def _counts(most: int) -> list[int]:
    powers = [1 << bits for bits in range(most.bit_length())]
    around = [power + more for power in powers for more in (-1, 0, 1)]
    return sorted({count for count in (*range(ALL_COUNTS_TO), *around, most) if MIN_ROWS <= count <= most})


# ---------------------------------------------------------------- attention


def attention_keeps_rows(kernels: Kernels, config: Qwen3Config, longest: int) -> bool:
    """Whether one token's attention has the same bits alone and beside others, with keys of its own and shared ones, and
    however much wider it is looked at than it sees."""
    widest = -(-min(longest, WIDEST) // WIDTH_STEP) * WIDTH_STEP
    generator = torch.Generator().manual_seed(0)
    heads, size = config.num_kv_heads, config.head_dim
    q_KGD = torch.randn(heads, config.num_heads // heads, size, generator=generator) * size**-0.5
    keys_KWD, values_KWD = torch.randn(2, heads, widest, size, generator=generator)
    for tokens in sorted({1, WIDTH_STEP, WIDTH_STEP + 1, widest // 2, widest - 1}):
        width = -(-tokens // WIDTH_STEP) * WIDTH_STEP
        seen = [(q_KGD, keys_KWD[:, :each], values_KWD[:, :each], tokens) for each in (width, widest)]
        expected_KGD = _attended(kernels.each, *seen[0], rows=1)[0]
        for case in seen:
            for kernel in (kernels.each, kernels.same):
                if not all(torch.equal(row_KGD, expected_KGD) for row_KGD in _attended(kernel, *case, rows=_ROWS)):
                    return False
    return True


def _attended(
    kernel: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
    q_KGD: Tensor,
    keys_KWD: Tensor,
    values_KWD: Tensor,
    tokens: int,
    *,
    rows: int,
) -> list[Tensor]:
    """As many times as there are rows, which all see the same."""
    own = rows if kernel.__name__ == "each" else 1
    q_XGD = q_KGD.repeat(rows, 1, 1)
    mask_R1W = torch.where(torch.arange(keys_KWD.shape[1]) < tokens, 0.0, float("-inf")).expand(rows, 1, -1)
    out_XGD = torch.empty_like(q_XGD)
    kernel(q_XGD, keys_KWD.repeat(own, 1, 1), values_KWD.repeat(own, 1, 1), mask_R1W, out_XGD)
    return list(out_XGD.unflatten(0, (rows, -1)))
