"""Orthogonalization by products of matrices alone, which is Muon's update."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


def orthogonalized(matrices_KRC: Tensor) -> Tensor:
    """Each of K matrices [R, C] with its singular values moved to about 1 (0.7 to 1.2), by five quintic steps.

    Source: https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = COEFFICIENTS
    tall = matrices_KRC.shape[-2] > matrices_KRC.shape[-1]
    x = matrices_KRC.mT if tall else matrices_KRC
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
