"""Matrix products of a pass: of all its rows at once, or in tiles of so many rows each.

Of all at once is faster. Whether a row's bits then depend on how many rows there are is a matter of the machine's
library: engine/row_trial.py finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Products(NamedTuple):
    """N rows of K, by a matrix [K, F]."""

    plain: Callable[[Tensor, Tensor], Tensor]  # x_NK, weights_KF -> [N, F]
    added: Callable[[Tensor, Tensor, Tensor], Tensor]  # to_NF, x_NK, weights_KF -> [N, F]
    tile_rows: int = 0  # 0: all at once


WHOLE = Products(torch.mm, torch.addmm)


def tiled(rows: int) -> Products:
    """Every product has so many rows, the last ones of a pass filled up with zeros."""

    def plain(x_NK: Tensor, weights_KF: Tensor) -> Tensor:
        count = len(x_NK)
        missing = -count % rows
        if missing:
            x_NK = functional.pad(x_NK, (0, 0, 0, missing))
        out = x_NK.new_empty((count + missing, weights_KF.shape[1]))
        for tile, into in zip(x_NK.split(rows), out.split(rows), strict=True):
            torch.mm(tile, weights_KF, out=into)
        return out[:count]

    def added(to_NF: Tensor, x_NK: Tensor, weights_KF: Tensor) -> Tensor:
        return to_NF + plain(x_NK, weights_KF)

    return Products(plain, added, rows)
