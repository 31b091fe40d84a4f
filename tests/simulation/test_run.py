"""Whole runs under a virtual clock, seed after seed: every trajectory ends once, the numbers add up, replays agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace

from actors.decider_loop import REFUSED, state_fingerprint
from actors.wiring import HEAD, ROLLOUT
from bus.codec import decode
from bus.messages import ProtocolError, RunFinished, StartGroup
from configs.schema import Dialogue, Engine, Evaluation, Rl, Run
from policies.arbiter import Arbiter
from tests.simulation.clock import Deadlock, run_virtually
from tests.simulation.replaying import replay
from tests.simulation.world import World

RUN = Run(
    name="simulated",
    dialogue=Dialogue(prompt_tokens=16, response_tokens=400),
    engine=Engine(kv_tokens=2048, num_engines=2),  # room for nine trajectories of sixteen
    rl=Rl(steps=3, prompts=4, rollouts=4, refills=2),
    evaluation=Evaluation(questions=3),
)


def simulate(seed: int, trouble: float, run: Run = RUN) -> World:
    world = World(run, seed, trouble)
    assert run_virtually(world.live()) == RunFinished(run.rl.steps)
    return world


live = cache(simulate)


def kinds(world: World, process: str) -> Counter[str]:
    return Counter(event.kind for event in world.logs[process].events)


SEEDS = [pytest.param(seed, marks=() if seed == 1 else pytest.mark.slow) for seed in range(60)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("trouble", [0.0, 0.1])
def test_every_trajectory_that_starts_ends_once(seed: int, trouble: float) -> None:
    world = live(seed, trouble)
    groups = [decode(event.frame).message for event in world.logs[ROLLOUT].events if event.kind == "StartGroup"]
    started = sum(group.size for group in groups if isinstance(group, StartGroup))
    seen = kinds(world, HEAD)
    assert started == seen["TrajectoryFinished"] + seen["TrajectoryFailed"] > 48
    assert bool(seen["TrajectoryFailed"]) <= bool(trouble)
    assert [batch.step for batch in world.batches] == [1, 2, 3]
    assert [line.step for line in world.metrics if line.kind == "step"] == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_refused_where_nobody_repeats_himself(seed: int) -> None:
    world = live(seed, 0.1)
    for log in world.logs.values():
        assert all(decision.effects != REFUSED for decision in log.decisions.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_of_the_log_gives_the_same_states_and_effects(seed: int) -> None:
    world = live(seed, 0.1)
    decided = list(replay(world, world.deciders()))
    assert len(decided) == sum(len(log.events) for log in world.logs.values()) > 0


def test_a_log_of_two_lives_is_replayed_as_two_lives() -> None:
    """As after a resume: the second life begins with RunStarted, and owes nothing to the first."""
    deciders = live(1, 0.1).deciders()
    for _ in range(2):
        assert len(list(replay(live(1, 0.1), deciders))) > 0


def test_all_leases_are_given_back_at_the_end() -> None:
    world = live(1, 0.1)
    arbiter = world.deciders()[HEAD]["arbiter"]
    assert isinstance(arbiter, Arbiter)
    for event in world.logs[HEAD].events:
        if event.actor == "arbiter":
            arbiter.decide(event.time, decode(event.frame).message)
            for engine in arbiter.ledger.engines.values():
                assert 0 <= engine.leased_pages <= engine.pages
    assert not arbiter.ledger.holdings
    assert [engine.leased_pages for engine in arbiter.ledger.engines.values()] == [0, 0]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    first, second = live(1, 0.1), simulate(1, 0.1)
    assert first.logs[HEAD].events == second.logs[HEAD].events
    assert first.batches == second.batches


def test_a_slow_tool_call_delays_no_other_trajectory() -> None:
    """With tools of up to 4 s, sixteen trajectories at once take about as long as the slowest one."""
    run = replace(RUN, rl=Rl(steps=1, prompts=4, rollouts=4, refills=0), evaluation=Evaluation(questions=0))
    world = simulate(1, 0.0, replace(run, engine=Engine(kv_tokens=65_536)))
    (step,) = [line.values for line in world.metrics if line.kind == "step"]
    summed = step["trajectories"] * (step["wait_generation_s"] + step["wait_tools_s"] + step["wait_grading_s"])
    assert step["rollout_s"] < summed / 4


def test_a_world_in_which_nobody_answers_is_reported_as_a_deadlock() -> None:
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
            before = state_fingerprint(deciders[event.actor].state_after(message))
            with pytest.raises(ProtocolError):
                deciders[event.actor].decide(event.time, message)
            assert state_fingerprint(deciders[event.actor].state_after(message)) == before
