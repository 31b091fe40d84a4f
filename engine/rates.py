"""The learning rate's course: what share of the full rate a step has."""

from __future__ import annotations

import math


def cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Share of the full rate at `step` (from 0): a linear rise over the warm-up, then half a cosine towards 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    passed = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, passed)))


def linear(step: int, steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Share of the full rate at `step` (from 0): a linear rise over the warm-up, then a line to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    passed = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return 1.0 + (final_fraction - 1.0) * min(1.0, passed)
