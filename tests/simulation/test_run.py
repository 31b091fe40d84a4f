"""Whole runs under a virtual clock, without process faults."""

import asyncio
from collections import Counter
from functools import cache

import pytest

from asterism.actors.runtime.decider_loop import compute_state_fingerprint
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.messages import ProtocolError, StartGroup
from asterism.configs.schema.schema_tree import replace_keys
from asterism.policies.arbiter.arbiter import Arbiter
from tests.simulation.clock import Deadlock, run_virtually
from tests.simulation.invariants import replay, select
from tests.simulation.seeds import select_seeds
from tests.simulation.small_run import SMALL
from tests.simulation.world import World


@cache
def live(seed: int, failure_rate: float) -> World:
    return World(SMALL, seed, failure_rate).play()


def kinds(world: World, process: str) -> Counter[str]:
    return Counter(event.kind for event in world.logs[process].events)


SEEDS = select_seeds(60, fast=(1,), per_change=7)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("failure_rate", [0.0, 0.1])
def test_every_trajectory_that_starts_ends_once(seed: int, failure_rate: float) -> None:
    world = live(seed, failure_rate)
    started = sum(group.size for group in select(world.logs[ROLLOUT].events, StartGroup))
    seen = kinds(world, HEAD)
    assert started == seen["TrajectoryFinished"] + seen["TrajectoryFailed"] > 48
    assert bool(seen["TrajectoryFailed"]) <= bool(failure_rate)
    assert [batch.step for batch in world.batches] == [1, 2, 3]
    assert [line.step for line in world.metrics if line.kind == "step"] == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_refused_without_duplicate_messages(seed: int) -> None:
    world = live(seed, 0.1)
    for log in world.logs.values():
        assert not any(decision.is_refused for decision in log.decisions.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_of_the_log_gives_the_same_states_and_effects(seed: int) -> None:
    world = live(seed, 0.1)
    decided = list(replay(world, world.deciders()))
    assert len(decided) == sum(len(log.events) for log in world.logs.values()) > 0


@pytest.mark.slow
def test_a_log_of_two_incarnations_is_replayed_as_two_incarnations() -> None:
    """After a resume, the second incarnation begins with RunStarted and without earlier state."""
    deciders = live(1, 0.1).deciders()
    for _ in range(2):
        assert len(list(replay(live(1, 0.1), deciders))) > 0


def test_all_leases_are_released_at_the_end() -> None:
    world = live(1, 0.1)
    arbiter = world.deciders()[HEAD]["arbiter"]
    assert isinstance(arbiter, Arbiter)
    for event in world.logs[HEAD].events:
        if event.actor == "arbiter":
            arbiter.decide(event.time, decode(event.frame).message)
            for engine in arbiter.ledger.engines.values():
                assert 0 <= engine.leased_pages <= engine.total_pages
    assert not arbiter.ledger.accounts
    assert [engine.leased_pages for engine in arbiter.ledger.engines.values()] == [0, 0]


def test_a_slow_tool_call_delays_no_other_trajectory() -> None:
    """With tool calls of up to 4 s, 16 trajectories take about as long as the slowest one."""
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
