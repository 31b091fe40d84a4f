"""Schedules of the learning rate."""

import math


def cosine_schedule(step: int, steps: int, warmup_steps: int) -> float:
    """Return the fraction of the full rate at `step` (from 0): linear warm-up, then half a cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    passed = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, passed)))


def linear_schedule(step: int, steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Return the fraction of the full rate at `step` (from 0): linear warm-up, linear decay to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    passed = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return 1.0 + (final_fraction - 1.0) * min(1.0, passed)
