"""Errors and limits of checks, and functions that measure a difference."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# Relative error of float32 on a device against the CPU. Measured on a CPU: float32 differs from float64 by up to 9e-7
# (logits) and 2e-6 (gradients). Another order of summation differs as little; a product in TF32 differs by 3e-4.
FLOAT32_LIMIT = 1e-4
# One rounding to bfloat16 has an error of 0.4% at most. On a CPU, two layers have 0.014 (logits) and 0.025 (gradients).
BFLOAT16_LIMIT = 6e-2


class Measured(NamedTuple):
    name: str  # printed after the name of its check
    error: float
    limit: float

    @property
    def has_passed(self) -> bool:
        """True if the error is within its limit. A NaN fails."""
        return self.error <= self.limit


def compute_relative_error(found: Tensor, expected: Tensor, smallest_norm: float = 0.0) -> float:
    """Return the norm of the difference over the norm of the expected values, or over a larger `smallest_norm`."""
    found, expected = found.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    difference, norm = (found - expected).norm().item(), max(expected.norm().item(), smallest_norm)
    return difference / norm if norm else difference


def compute_worst_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest error of a tensor, relative to its norm or to 1% of the norm of all tensors if this is larger.

    Some gradients, such as that of the key bias, are almost 0: their rounding errors have no meaning.
    """
    whole = torch.stack([each.detach().double().norm().cpu() for each in expected.values()]).norm().item()
    errors = [compute_relative_error(found[name], each, whole / 100) for name, each in expected.items()]
    return max(errors) if all(error == error for error in errors) else float("nan")


def count_differing(found: Iterable[Tensor], expected: Iterable[Tensor]) -> int:
    """Count the elements with different bits."""
    pairs = zip(found, expected, strict=True)
    return sum(int((_view_bits(a) != _view_bits(b)).sum()) for a, b in pairs)


def _view_bits(values: Tensor) -> Tensor:
    values = values.detach().cpu().contiguous()
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)
