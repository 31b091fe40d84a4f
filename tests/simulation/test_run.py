"""Whole runs under a virtual clock, without process faults."""

import asyncio
from collections import Counter
from functools import cache

import pytest

from asterism.actors.runtime.decider_loop import compute_state_fingerprint
from asterism.bus.addresses import HEAD
from asterism.bus.codec import decode
from asterism.bus.messages import ProtocolError
from asterism.configs.schema.schema_tree import replace_keys
from tests.simulation.clock import Deadlock, run_virtually
from tests.simulation.invariants import check, check_the_counts, replay
from tests.simulation.seeds import select_seeds
from tests.simulation.small_run import SMALL
from tests.simulation.world import World


@cache
def live(seed: int, failure_rate: float) -> World:
    return World(SMALL, seed, failure_rate).play()


SEEDS = select_seeds(60, fast=(1,), per_change=3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("failure_rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_run_keeps_all_invariants_and_refuses_nothing(seed: int, failure_rate: float) -> None:
    world = live(seed, failure_rate)
    check(world)
    check_the_counts(world)
    assert not any(decision.is_refused for log in world.logs.values() for decision in log.decisions.values())
    seen = Counter(event.kind for event in world.logs[HEAD].events)
    assert seen["TrajectoryFinished"] + seen["TrajectoryFailed"] > 48
    assert bool(seen["TrajectoryFailed"]) <= bool(failure_rate)


@pytest.mark.slow
def test_the_replay_of_a_second_incarnation_starts_without_earlier_state() -> None:
    """The log begins again with RunStarted after a resume; the replay must then start without earlier state."""
    deciders = live(1, 0.1).deciders()
    for _ in range(2):
        assert len(list(replay(live(1, 0.1), deciders))) > 0


def test_a_slow_tool_call_delays_no_other_trajectory() -> None:
    """With tool calls of up to 4 s, 16 trajectories together take about as long as the slowest trajectory."""
    changes = {"rl.steps": 1, "rl.max_refill_groups": 0, "evaluation.questions": 0}
    run = replace_keys(SMALL, {**changes, "engine.kv_tokens": 65_536, "engine.num_engines": 1})
    world = World(run, 1, failure_rate=0.0).play()
    (step,) = [line.values for line in world.metrics if line.kind == "step"]
    summed = step["trajectories"] * (step["wait_generation_s"] + step["wait_tools_s"] + step["wait_grading_s"])
    assert step["rollout_s"] < summed / 4


def test_a_run_without_answers_is_reported_as_a_deadlock() -> None:
    async def wait_for_godot() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="wait_for_godot"):
        run_virtually(wait_for_godot())


@pytest.mark.slow
def test_a_trajectory_that_reports_twice_is_refused_and_changes_nothing() -> None:
    world = live(1, 0.0)
    deciders = world.deciders()[HEAD]
    for event in world.logs[HEAD].events:
        message = decode(event.frame).message
        deciders[event.actor].decide(event.time, message)
        if event.kind in ("TrajectoryFinished", "LeaseRequested"):
            before = compute_state_fingerprint(deciders[event.actor].get_state_after(message))
            with pytest.raises(ProtocolError):
                deciders[event.actor].decide(event.time, message)
            assert compute_state_fingerprint(deciders[event.actor].get_state_after(message)) == before
