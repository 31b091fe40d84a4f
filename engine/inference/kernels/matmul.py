"""The matrix products of a pass: one product of all rows, or tiles of a fixed number of rows.

One product of all rows is faster. With some libraries a row's bits then depend on the number of rows:
engine/inference/kernels/batch_invariance.py tests this.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Matmul(NamedTuple):
    """Products of N rows with a matrix [K, F]."""

    mm: Callable[[Tensor, Tensor], Tensor]  # x_NK, weights_KF -> [N, F]
    add_mm: Callable[[Tensor, Tensor, Tensor], Tensor]  # to_NF, x_NK, weights_KF -> [N, F]
    tile_rows: int = 0  # 0: all rows in one product


PLAIN = Matmul(torch.mm, torch.addmm)


def compute_logits(mm: Callable[[Tensor, Tensor], Tensor], x_NE: Tensor, lm_head_EV: Tensor) -> Tensor:
    """Compute logits, float32 [N, V]. On CUDA, products of 16-bit matrices are accumulated and returned in float32.

    On a CPU, logits are rounded to the dtype of the matrices: `torch.mm` has no option for float32 results, and a
    product of matrices that are cast in blocks of the vocabulary takes 1.8 to 3 times as long.
    """
    if x_NE.is_cuda and x_NE.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x_NE, lm_head_EV, out_dtype=torch.float32)
    return mm(x_NE, lm_head_EV).float()


def build_tiled(tile_rows: int) -> Matmul:
    """Build products of `tile_rows` rows each; zeros pad the last tile of a pass."""

    def mm(x_NK: Tensor, weights_KF: Tensor) -> Tensor:
        count = len(x_NK)
        missing = -count % tile_rows
        if missing:
            x_NK = functional.pad(x_NK, (0, 0, 0, missing))
        out = x_NK.new_empty((count + missing, weights_KF.shape[1]))
        for tile, into in zip(x_NK.split(tile_rows), out.split(tile_rows), strict=True):
            torch.mm(tile, weights_KF, out=into)
        return out[:count]

    def add_mm(to_NF: Tensor, x_NK: Tensor, weights_KF: Tensor) -> Tensor:
        return to_NF + mm(x_NK, weights_KF)

    return Matmul(mm, add_mm, tile_rows)
