"""Runs with executor kills and restarts under a virtual clock."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest

from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.event_log.records import Event
from asterism.configs.schema.schema_tree import replace_keys
from asterism.policies.rollout.rollout import Rollout
from tests.fakes import TOKENIZER
from tests.simulation.invariants import check_each_trajectory_ends_once, launches, select
from tests.simulation.seeds import select_seeds
from tests.simulation.small_run import SMALL
from tests.simulation.world import Faults, World

pytestmark = pytest.mark.slow

RUN = replace_keys(
    SMALL,
    {
        **{"dialogue.response_tokens": 1200, "dialogue.max_calls_per_turn": 2},
        **{"engine.kv_tokens": 65_536, "engine.num_engines": 1, "sandbox.executors": 3},
    },
)
KILLS = 0.3  # kills per second for each executor; calls of 4 s rarely finish
LAGS = 0.05  # some answers arrive after the loss of their executor
COVERING_SEEDS = (3, 6)  # together, these seeds cover all tested faults
SEEDS = select_seeds(80, fast=COVERING_SEEDS[:1], per_change=4)


@cache
def live(seed: int, failure_rate: float = 0.05) -> World:
    run = replace_keys(RUN, {"sandbox.executors": 1 + 2 * (seed % 2)})
    world = World(run, seed, failure_rate, Faults(executor_deaths=KILLS, lags=LAGS)).play()
    assert world.deaths["executor"] > 3
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_every_trajectory_ends_once_under_kills(seed: int) -> None:
    world = live(seed)
    check_each_trajectory_ends_once(world)
    events = world.logs[HEAD].events
    assert len(select(events, msg.TrajectoryFinished, msg.TrajectoryFailed)) > 48
    causes = {end.cause.partition(":")[0] for end in select(events, msg.TrajectoryFailed)}
    assert causes <= {"executor left", "sandbox", "grader", "engine"}
    assert [batch.step for batch in world.batches] == [1, 2, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_call_is_answered_twice_and_late_answers_are_accepted(seed: int) -> None:
    world = live(seed)
    assert not any(decision.is_refused for decision in world.logs[ROLLOUT].decisions.values())
    num_taken = 0
    for events in launches(world, ROLLOUT):  # there are several launches if all trajectories of an evaluation fail
        rollout, taken, _ = replay_answers(world, events)
        assert set(taken.values()) <= {1}
        num_taken += len(taken)
    assert num_taken > 0
    assert not rollout.trajectories
    assert not rollout.waiting_for_executor
    assert all(load.open_calls == 0 for load in rollout.placement.loads.values())


def replay_answers(world: World, events: Sequence[Event]) -> tuple[Rollout, Counter[tuple[int, int]], int]:
    """Replay a launch. Return the final state, the number of answers by call, and the number of late answers.

    Late answers must have no effect.
    """
    rollout = world.deciders()[ROLLOUT][ROLLOUT]
    assert isinstance(rollout, Rollout)
    taken, late = Counter[tuple[int, int]](), 0
    for event in events:
        message = decode(event.frame).message
        before = dict(rollout.trajectories)
        effects = rollout.decide(event.time, message)
        if not isinstance(message, msg.CodeFinished | msg.CallFailed | msg.AnswerGraded):
            continue
        asked = before.get(message.trajectory_id)
        if asked is None or asked.executor != message.executor:
            assert not effects
            assert rollout.trajectories == before
            late += not isinstance(message, msg.CallFailed)
        elif isinstance(message, msg.CodeFinished | msg.AnswerGraded):
            taken[message.trajectory_id, getattr(message, "call", -1)] += 1
    return rollout, taken, late


@pytest.mark.parametrize("seed", SEEDS)
def test_a_moved_notebook_continues_its_cell_numbers(seed: int) -> None:
    """The cell numbers in the text of each trajectory are consecutive."""
    for finished in select(live(seed).logs[HEAD].events, msg.TrajectoryFinished):
        text = TOKENIZER.decode(msg.bytes_to_ids(finished.record.token_ids))
        cells = sorted(int(number) for number in re.findall(r"cell (\d+)", text))
        assert cells == list(range(1, len(cells) + 1))


def test_the_seeds_cover_the_tested_faults() -> None:
    """The faults are late answers, rescheduled calls, waiting calls and lost trajectories."""
    worlds = [live(seed) for seed in COVERING_SEEDS]
    rescheduled = [rescheduled for world in worlds for rescheduled in world.rescheduled]
    assert sum(each.sent for each in rescheduled) > 10
    assert sum(each.lost for each in rescheduled) > 3
    assert any(each.waiting for each in rescheduled)
    assert sum(replay_answers(world, events)[2] for world in worlds for events in launches(world, ROLLOUT)) > 0


def test_executors_share_the_load_and_lose_no_trajectory_without_kills() -> None:
    share: Counter[str] = Counter()
    for seed in (1, 2):
        world = World(RUN, seed, failure_rate=0.0).play()
        share.update(answer.executor for answer in select(world.logs[ROLLOUT].events, msg.CodeFinished))
        assert all(each.lost == 0 for each in world.rescheduled)
    assert set(share) == {"executor-0/1", "executor-1/1", "executor-2/1"}
    assert min(share.values()) > max(share.values()) / 4
