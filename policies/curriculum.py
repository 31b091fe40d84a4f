"""Which problem comes next: every epoch takes each problem once, in an order of its own."""

from __future__ import annotations

from functools import lru_cache

from policies.draws import ORDER, shuffled


@lru_cache(maxsize=4)
def _epoch_order(num_problems: int, seed: int, epoch: int) -> list[int]:
    return shuffled(num_problems, seed, ORDER, epoch)


def problem_at(position: int, num_problems: int, seed: int) -> int:
    """Index of the problem at `position` of the endless sequence."""
    return _epoch_order(num_problems, seed, position // num_problems)[position % num_problems]
