"""Executors that are killed in the middle of their work and come back, under a virtual clock, seed after seed."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest
from msgspec.structs import replace

from actors.decider_loop import REFUSED
from actors.wiring import HEAD, ROLLOUT
from bus.codec import decode
from bus.messages import (
    AnswerGraded,
    CallFailed,
    CodeFinished,
    RunFinished,
    StartGroup,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.schema import Dialogue, Engine, Evaluation, Rl, Run, Sandbox
from policies.record import bytes_to_ids
from policies.rollout import Rollout
from tests.fakes import TOKENIZER
from tests.simulation.clock import run_virtually
from tests.simulation.replaying import replay
from tests.simulation.world import Faults, World

RUN = Run(
    name="simulated",
    dialogue=Dialogue(prompt_tokens=16, response_tokens=1200, max_calls_per_turn=2),
    engine=Engine(kv_tokens=65_536),
    sandbox=Sandbox(executors=3),  # or a single one, by the seed
    rl=Rl(steps=3, prompts=4, rollouts=4, refills=2),
    evaluation=Evaluation(questions=3),
)
KILLS = 0.3  # deaths an executor dies a second: a call of four seconds seldom gets through
LAGS = 0.05  # an answer may come when its executor is known to be gone
TELLING = (3, 6)  # between them they have all that is to be tested
SEEDS = [*TELLING, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(80) if seed not in TELLING)]


@cache
def live(seed: int, trouble: float = 0.05) -> World:
    world = World(
        replace(RUN, sandbox=Sandbox(executors=1 + 2 * (seed % 2))),
        seed,
        trouble,
        Faults(executor_deaths=KILLS, lags=LAGS),
    )
    assert run_virtually(world.live()) == RunFinished(3)
    assert world.deaths["executor"] > 3
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_every_trajectory_ends_once_whoever_is_killed(seed: int) -> None:
    world = live(seed)
    received = [decode(event.frame).message for event in world.logs[ROLLOUT].events]
    started = sum(message.size for message in received if isinstance(message, StartGroup))
    heard = [decode(event.frame).message for event in world.logs[HEAD].events]
    ended = [message for message in heard if isinstance(message, TrajectoryFinished | TrajectoryFailed)]
    assert started == len(ended) == len({end.trajectory_id for end in ended}) > 48
    causes = Counter(end.cause.partition(":")[0] for end in ended if isinstance(end, TrajectoryFailed))
    assert set(causes) <= {"executor left", "sandbox", "grader", "engine"}
    assert [batch.step for batch in world.batches] == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_call_is_answered_twice_and_late_answers_are_no_offence(seed: int) -> None:
    world = live(seed)
    rollout = world.deciders()[ROLLOUT][ROLLOUT]
    assert isinstance(rollout, Rollout)
    taken: Counter[tuple[int, int]] = Counter()
    for event in world.logs[ROLLOUT].events:
        message = decode(event.frame).message
        before = dict(rollout.trajectories)
        effects = rollout.decide(event.time, message)
        assert world.logs[ROLLOUT].decisions[event.seq].effects != REFUSED
        if not isinstance(message, CodeFinished | CallFailed | AnswerGraded):
            continue
        asked = before.get(message.trajectory_id)
        if asked is None or asked.executor != message.executor:
            assert not effects
            assert rollout.trajectories == before
        elif isinstance(message, CodeFinished | AnswerGraded):
            taken[message.trajectory_id, getattr(message, "call", -1)] += 1
    assert set(taken.values()) == {1}
    assert not rollout.trajectories
    assert not rollout.waiting
    assert all(load.open_calls == 0 for load in rollout.placement.loads.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_model_never_sees_that_its_notebook_has_moved(seed: int) -> None:
    """Each cell says how many the notebook has lived through: all that the model was told of, each once."""
    world = live(seed)
    for event in world.logs[HEAD].events:
        message = decode(event.frame).message
        if isinstance(message, TrajectoryFinished):
            text = TOKENIZER.decode(bytes_to_ids(message.token_ids))
            cells = sorted(int(number) for number in re.findall(r"cell (\d+)", text))
            assert cells == list(range(1, len(cells) + 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_with_executors_that_come_and_go_is_identical(seed: int) -> None:
    world = live(seed)
    decided = list(replay(world, world.deciders()))
    assert len(decided) == sum(len(log.events) for log in world.logs.values()) > 0


def test_the_seeds_contain_what_they_are_to_test() -> None:
    """Late answers, calls that moved, calls that waited, trajectories that were lost with their executor."""
    worlds = [live(seed) for seed in TELLING]
    moved = [moved for world in worlds for moved in world.moved]
    assert sum(each.sent for each in moved) > 10
    assert sum(each.lost for each in moved) > 3
    assert any(each.waiting for each in moved)
    late = 0
    for world in worlds:
        rollout = world.deciders()[ROLLOUT][ROLLOUT]
        assert isinstance(rollout, Rollout)
        for event in world.logs[ROLLOUT].events:
            message = decode(event.frame).message
            if isinstance(message, CodeFinished | AnswerGraded):
                asked = rollout.trajectories.get(message.trajectory_id)
                late += asked is None or asked.executor != message.executor
            rollout.decide(event.time, message)
    assert late > 0


@pytest.mark.slow
def test_without_kills_no_trajectory_is_lost_and_the_load_is_shared() -> None:
    share: Counter[str] = Counter()
    for seed in (1, 2):
        world = World(RUN, seed, trouble=0.0)
        assert run_virtually(world.live()) == RunFinished(3)
        answers = [decode(event.frame).message for event in world.logs[ROLLOUT].events]
        share.update(answer.executor for answer in answers if isinstance(answer, CodeFinished))
        assert all(each.lost == 0 for each in world.moved)
    assert set(share) == {"executor-0/1", "executor-1/1", "executor-2/1"}
    assert min(share.values()) > max(share.values()) / 4
