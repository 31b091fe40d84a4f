"""Anything happens to anybody, under a virtual clock: every process is killed at any moment, connections break, repeat and
part, and everything is killed at once, with and without the launcher. `make simulate-faults` has many more seeds."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.simulation.campaign import play, world_of
from tests.simulation.invariants import started_anew
from tests.simulation.world import World

TELLING = (0, 3, 5, 22)  # between them they have every fault
SEEDS = [*TELLING, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(300) if seed not in TELLING)]


@cache
def lived(seed: int) -> World:
    return play(world_of(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_numbers_add_up(seed: int) -> None:
    """All of tests.simulation.invariants."""
    assert lived(seed).batches


def test_the_seeds_contain_what_they_are_to_test() -> None:
    worlds = [lived(seed) for seed in TELLING]
    deaths, happened = Counter[str](), Counter[str]()
    for world in worlds:
        deaths += world.deaths
        happened += world.network.happened
    assert set(deaths) == {"head", "rollout", "learner", "generator", "executor", "launcher"}
    assert set(happened) >= {"break", "repeat", "partition"}
    assert sum(started_anew(world) for world in worlds) > 0
    assert sum(world.checked_loans for world in worlds) > 0


def test_the_same_seed_gives_the_same_run_to_the_byte() -> None:
    first, second = lived(3), play(world_of(3))
    assert first.history == second.history
    for process, log in first.logs.items():
        assert log.events == second.logs[process].events
        assert log.decisions == second.logs[process].decisions
