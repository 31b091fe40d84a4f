"""Runs with faults of every kind under a virtual clock.

Single processes and whole runs are killed; connections break, repeat messages and are
partitioned. `make simulate-faults` runs many more seeds.
"""

from collections import Counter
from functools import cache

import pytest

from tests.simulation.campaign import play, world_of
from tests.simulation.invariants import count_resumes
from tests.simulation.seeds import select_seeds
from tests.simulation.world import World

pytestmark = pytest.mark.slow  # a covering seed takes a second, and `make check` has 40 for all tests

COVERING_SEEDS = (0, 3, 5, 22)  # together, these seeds cover every fault
# `make nightly` plays all 300; with 26 instead of 12 a change, these runs took a tenth of the time of `make test`.
SEEDS = select_seeds(300, fast=COVERING_SEEDS, per_change=12)


@cache
def played(seed: int) -> World:
    return play(world_of(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_add_up_under_all_faults(seed: int) -> None:
    """`play` checks all invariants of tests.simulation.invariants."""
    assert played(seed).batches


def test_the_seeds_cover_the_tested_faults() -> None:
    worlds = [played(seed) for seed in COVERING_SEEDS]
    deaths, happened = Counter[str](), Counter[str]()
    for world in worlds:
        deaths += world.deaths
        happened += world.network.happened
    assert set(deaths) == {"head", "rollout", "learner", "generator", "executor", "launcher"}
    assert set(happened) >= {"break", "repeat", "partition"}
    assert sum(count_resumes(world) for world in worlds) > 0
    assert sum(world.checked_loans for world in worlds) > 0


def test_the_same_seed_gives_the_same_run_to_the_byte() -> None:
    first, second = played(3), play(world_of(3))
    assert first.history == second.history
    for process, log in first.logs.items():
        assert log.events == second.logs[process].events
        assert log.decisions == second.logs[process].decisions
