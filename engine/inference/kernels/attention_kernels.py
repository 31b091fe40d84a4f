"""Attention kernels: batch-invariant products for a CPU, torch's scaled_dot_product_attention for CUDA.

R rows, K key/value heads, X = R * K, G queries per key/value head, W tokens. Queries are already scaled. A mask
contains 0 and -inf, and leaves each row at least one token.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_MAX_SCORES = 1 << 20  # scores of one product; a fused kernel needs no memory for more of them
_QUERIES_PER_BMM = 2  # products of at most this many queries have the same bits in every batch


class AttentionKernels(Protocol):
    @property
    def max_rowwise_tokens(self) -> int:
        """Return the size of a prompt's chunk up to which each row gets its own copy of the keys and values."""
        ...

    def attend_per_row(
        self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        """Compute attention of rows with separate keys and values."""
        ...

    def attend_shared(
        self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        """Compute attention of rows that share the same keys and values."""
        ...


def select_kernels(device: torch.device) -> AttentionKernels:
    return BatchInvariantKernels() if device.type == "cpu" else SdpaKernels()


class BatchInvariantKernels:
    """Kernels for a CPU. In float32 a row's bits do not depend on other rows: product shapes differ only in W."""

    max_rowwise_tokens = 16

    def attend_per_row(
        self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        group = q_XGD.shape[1]
        for line in range(0, group, _QUERIES_PER_BMM):
            lines = slice(line, line + _QUERIES_PER_BMM)
            scores = torch.bmm(q_XGD[:, lines], keys_XWD.transpose(1, 2))
            scores.view(len(mask_R1W), -1, scores.shape[-1]).add_(mask_R1W)
            if group <= _QUERIES_PER_BMM:
                torch.bmm(scores.softmax(-1), values_XWD, out=out_XGD)
            else:
                out_XGD[:, lines] = torch.bmm(scores.softmax(-1), values_XWD)

    def attend_shared(
        self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        rows = len(mask_R1W)
        q_RKGD, out_RKGD = (part.unflatten(0, (rows, -1)) for part in (q_XGD, out_XGD))
        for head, (keys_WD, values_WD) in enumerate(zip(keys_KWD, values_KWD, strict=True)):
            keys_RDW, values_RWD = keys_WD.t().expand(rows, -1, -1), values_WD.expand(rows, -1, -1)
            for line in range(0, q_XGD.shape[1], _QUERIES_PER_BMM):
                lines = slice(line, line + _QUERIES_PER_BMM)
                scores = torch.bmm(q_RKGD[:, head, lines], keys_RDW).add_(mask_R1W)
                out_RKGD[:, head, lines] = torch.bmm(scores.softmax(-1), values_RWD)


class SdpaKernels:
    """One fused kernel for CUDA; its order of summation depends on the batch.

    The G queries of a head form the sequence dimension, so that their keys and values are not repeated.
    """

    max_rowwise_tokens = 16

    def attend_per_row(
        self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        shape = (len(mask_R1W), -1)
        q_RKGD, keys_RKWD, values_RKWD, out_RKGD = (
            part.unflatten(0, shape) for part in (q_XGD, keys_XWD, values_XWD, out_XGD)
        )
        out_RKGD.copy_(_attend(q_RKGD, keys_RKWD, values_RKWD, mask_R1W[:, None]))

    def attend_shared(
        self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        shape = (len(mask_R1W), -1)
        q_KGRD, out_KGRD = (part.unflatten(0, shape).permute(1, 2, 0, 3) for part in (q_XGD, out_XGD))
        for line in range(q_XGD.shape[1]):
            out_KGRD[:, line] = _attend(
                q_KGRD[None, :, line], keys_KWD[None], values_KWD[None], mask_R1W[None, None, :, 0]
            )[0]


class FastCpuKernels(SdpaKernels):
    """Kernels for a CPU that computes few rows at a time: two products take less time than a fused kernel."""

    max_rowwise_tokens = 1

    def attend_per_row(
        self, q_XGD: Tensor, keys_XWD: Tensor, values_XWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        scores = torch.bmm(q_XGD, keys_XWD.transpose(1, 2))
        scores.view(len(mask_R1W), -1, scores.shape[-1]).add_(mask_R1W)
        torch.bmm(scores.softmax(-1), values_XWD, out=out_XGD)

    def attend_shared(
        self, q_XGD: Tensor, keys_KWD: Tensor, values_KWD: Tensor, mask_R1W: Tensor, out_XGD: Tensor
    ) -> None:
        rows, (heads, width, size) = len(mask_R1W), keys_KWD.shape
        if q_XGD.shape[0] * q_XGD.shape[1] * width > _MAX_SCORES:
            super().attend_shared(q_XGD, keys_KWD, values_KWD, mask_R1W, out_XGD)
            return
        q_KLD = q_XGD.unflatten(0, (rows, heads)).transpose(0, 1).reshape(heads, -1, size)  # L = R * G
        scores_KLW = torch.bmm(q_KLD, keys_KWD.transpose(1, 2))
        scores_KLW.view(heads, rows, -1, width).add_(mask_R1W)
        seen_KRGD = torch.bmm(scores_KLW.softmax(-1), values_KWD).view(heads, rows, -1, size)
        out_XGD.unflatten(0, (rows, heads)).copy_(seen_KRGD.transpose(0, 1))


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, keys, values, mask, scale=1.0)
