"""Engines that die and come back, answers that come late, messages that come twice, and links that overtake each other,
under a virtual clock."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import get_args

import pytest
from msgspec.structs import replace

from actors.decider_loop import REFUSED
from bus.messages import RunFinished
from configs.schema import Arbiter as ArbiterSection
from configs.schema import Dialogue, Engine, Evaluation, Rl, Run
from policies.scheduling import PolicyName
from tests.simulation.clock import run_virtually
from tests.simulation.invariants import check_that_each_ends_once, check_the_engines, check_the_replay, check_the_steps
from tests.simulation.world import Faults, World

RUN = Run(
    name="simulated",
    dialogue=Dialogue(prompt_tokens=16, response_tokens=400, max_calls_per_turn=2),
    engine=Engine(kv_tokens=1024, num_engines=3),  # room for two trajectories in the worst case, of forty-eight
    rl=Rl(steps=2, prompts=3, rollouts=4, refills=2),
    evaluation=Evaluation(questions=2),
)
RL = (
    RUN.rl,
    replace(RUN.rl, oversubscribe=1.5),  # what is left over is stopped
    replace(RUN.rl, steps=3, max_staleness=1, oversubscribe=1.5, leftovers="carry"),
    replace(RUN.rl, steps=4, max_staleness=2, oversubscribe=1.5),
)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
FAULTS = Faults(engine_deaths=0.1, echoes=0.05, lags=0.05, evictions=0.1)
SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 200))]  # a fifth for each policy


def world_of(seed: int) -> World:
    """Each policy with each kind of step in turn."""
    policy, rl = POLICIES[seed % len(POLICIES)], RL[seed % len(RL)]
    run = replace(RUN, arbiter=ArbiterSection(policy), rl=rl)
    return World(run, seed, trouble=0.05, faults=replace(FAULTS, executor_deaths=0.1 * (seed % 2)))


@cache
def live(seed: int) -> World:
    world = world_of(seed)
    assert run_virtually(world.live()) == RunFinished(world.run.rl.steps)
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_every_trajectory_ends_once_whatever_engines_do_and_whatever_comes_twice(seed: int) -> None:
    check_that_each_ends_once(live(seed))
    check_the_steps(live(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_engine_is_left_with_a_turn_or_a_cache(seed: int) -> None:
    check_the_engines(live(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_with_lost_engines_and_refused_events_is_identical_and_nothing_is_left_over(seed: int) -> None:
    check_the_replay(live(seed))


def test_the_seeds_contain_what_they_are_to_test() -> None:
    worlds = [live(seed) for seed in range(5)]
    assert sum(world.deaths["generator"] for world in worlds) > 10
    refused = Counter(
        event.kind
        for world in worlds
        for log in world.logs.values()
        for event in log.events
        if log.decisions[event.seq].effects == REFUSED
    )
    of_trajectories = ("LeaseRequested", "LeaseGranted", "LeaseParked", "LeaseReleased", "TurnGenerated", "TurnFailed")
    of_lives = ("EngineJoined", "EngineLeft", "EngineLoadReported", "StartGroup")
    assert all(refused[kind] > 0 for kind in (*of_trajectories, *of_lives)), refused
    seen = Counter(event.kind for world in worlds for log in world.logs.values() for event in log.events)
    assert min(seen["GroupAborted"], seen["TrajectoryAborted"]) > 0
