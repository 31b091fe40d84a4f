"""Selects the seeds of a simulation suite for `make check`, `make test` and `make nightly`."""

from collections.abc import Collection
from typing import Any

import pytest


def select_seeds(count: int, *, fast: Collection[int], per_change: int) -> list[Any]:
    """Return the seeds 0 to `count` - 1 for parametrize. `fast` seeds have no mark; the next `per_change` seeds are
    slow; all others are slow and nightly."""
    others = [seed for seed in range(count) if seed not in fast]
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in others[:per_change]]
    nightly = [pytest.param(seed, marks=(pytest.mark.slow, pytest.mark.nightly)) for seed in others[per_change:]]
    return [*fast, *slow, *nightly]
