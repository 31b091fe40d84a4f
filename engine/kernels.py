"""Attention itself, once it is known which rows see what: line by line, or by torch's scaled_dot_product_attention.

R rows, K key/value heads, X = R * K, G queries to each of these; W tokens are looked at. Queries are scaled already; a
mask is 0 or -inf and leaves each row at least one token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_LINES = 2  # queries in one product: so many at most have the same bits in a batch and alone


class Kernels(Protocol):
    def each(self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor) -> None:
        """Every row has keys and values of its own."""
        ...

    def same(self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor) -> None:
        """All rows have the same."""
        ...


def kernels_for(device: torch.device) -> Kernels:
    return ByLines() if device.type == "cpu" else Fused()


class ByLines:
    """The same bits on a CPU in float32 whatever other rows there are: every product is of one shape but for its width."""

    def each(self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor) -> None:
        group = q_XGD.shape[1]
        for line in range(0, group, _LINES):
            lines = slice(line, line + _LINES)
            scores = torch.bmm(q_XGD[:, lines], keys_XWD.transpose(1, 2))
            scores.view(len(mask_R1W), -1, scores.shape[-1]).add_(mask_R1W)
            if group <= _LINES:
                torch.bmm(scores.softmax(-1), values_XWD, out=out_XGD)
            else:
                out_XGD[:, lines] = torch.bmm(scores.softmax(-1), values_XWD)

    def same(self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor) -> None:
        rows = len(mask_R1W)
        q_RKGD, out_RKGD = (part.unflatten(0, (rows, -1)) for part in (q_XGD, out_XGD))
        for head, (keys_WD, values_WD) in enumerate(zip(keys_KWD, values_KWD, strict=True)):
            keys_RDW, values_RWD = keys_WD.t().expand(rows, -1, -1), values_WD.expand(rows, -1, -1)
            for line in range(0, q_XGD.shape[1], _LINES):
                lines = slice(line, line + _LINES)
                scores = torch.bmm(q_RKGD[:, head, lines], keys_RDW).add_(mask_R1W)
                out_RKGD[:, head, lines] = torch.bmm(scores.softmax(-1), values_RWD)


class Fused:
    """For CUDA: one kernel, which keeps no scores; in which order it sums depends on the batch.

    A head's G queries stand where a sequence's places usually do, so that keys and values are not repeated for them.
    """

    def each(self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor) -> None:
        shape = (len(mask_R1W), -1)
        q_RKGD, keys_RKWD, values_RKWD, out_RKGD = (
            part.unflatten(0, shape) for part in (q_XGD, keys_XWD, values_XWD, out_XGD)
        )
        out_RKGD.copy_(_attend(q_RKGD, keys_RKWD, values_RKWD, mask_R1W[:, None]))

    def same(self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor) -> None:
        shape = (len(mask_R1W), -1)
        q_KGRD, out_KGRD = (part.unflatten(0, shape).permute(1, 2, 0, 3) for part in (q_XGD, out_XGD))
        for line in range(q_XGD.shape[1]):
            out_KGRD[:, line] = _attend(
                q_KGRD[None, :, line], keys_KWD[None], values_KWD[None], mask_R1W[None, None, :, 0]
            )[0]


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, keys, values, mask, scale=1.0)
