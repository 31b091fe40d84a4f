"""The matrix products of a pass: one product of all rows, or tiles of a fixed number of rows.

One product of all rows is faster. With some libraries a row's bits then depend on the number of rows:
engine/inference/kernels/batch_invariance.py tests this.

On a CPU, oneDNN reads matrices in blocks that it packs once. torch's plain products pack them at each call, which takes
longer than the product itself if there are few rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from asterism.engine.inference.buffer_sizes import MIN_PACKED_SIZE


def _keep(weights_KF: Tensor) -> Tensor:
    return weights_KF


class Matmul(NamedTuple):
    """Products of N rows with a matrix [K, F], which `prepare` returns."""

    mm: Callable[[Tensor, Tensor], Tensor]  # x_NK, weights_KF -> [N, F]
    add_mm: Callable[[Tensor, Tensor, Tensor], Tensor]  # to_NF, x_NK, weights_KF -> [N, F]
    tile_rows: int = 0  # 0: all rows in one product
    prepare: Callable[[Tensor], Tensor] = _keep

    @property
    def packs(self) -> bool:
        """Return whether `prepare` copies a matrix."""
        return self.prepare is not _keep


PLAIN = Matmul(torch.mm, torch.addmm)


def _pack(weights_KF: Tensor) -> Tensor:
    """Copy a matrix into oneDNN's blocks. Small matrices keep their layout."""
    if weights_KF.numel() < MIN_PACKED_SIZE:
        return weights_KF
    return torch.ops.mkldnn._reorder_linear_weight(weights_KF.t().contiguous())


def _multiply_packed(x_NK: Tensor, weights_KF: Tensor) -> Tensor:
    if not weights_KF.is_mkldnn:
        return torch.mm(x_NK, weights_KF)
    return torch.ops.mkldnn._linear_pointwise(x_NK, weights_KF, None, "none", [], "")


def _add_packed(to_NF: Tensor, x_NK: Tensor, weights_KF: Tensor) -> Tensor:
    if not weights_KF.is_mkldnn:
        return torch.addmm(to_NF, x_NK, weights_KF)
    return _multiply_packed(x_NK, weights_KF).add_(to_NF)


PACKED = Matmul(_multiply_packed, _add_packed, prepare=_pack)


def select_fast_matmul(device: torch.device, dtype: torch.dtype) -> Matmul:
    """Return packed products if oneDNN has them for this dtype on this machine, else plain products."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return PLAIN
    is_supported = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return PACKED if is_supported else PLAIN


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
