"""A trajectory's history, found in the log of a run in which executors and engines die and messages come twice: it stands
at the beginning of each turn as it stood there, and ends as it ended."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.decider_loop import REFUSED
from actors.logged_history import told_of
from actors.wiring import HEAD, ROLLOUT
from bus.codec import decode
from bus.messages import ProtocolError, StartGroup, TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from policies.history import Course, course_of
from policies.rollout import Rollout
from policies.trajectory import Trajectory
from tests.fakes import TOKENIZER
from tests.simulation.test_faults import live
from tests.simulation.world import World

LOG = Path("rollout-0.sqlite")  # as what is damaged would be named
SEEDS = [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]  # odd ones kill executors


def really_began(world: World) -> dict[int, list[Trajectory]]:
    """Each trajectory at the beginning of each of its turns, by a replay of the whole log."""
    rollout, began = world.deciders()[ROLLOUT][ROLLOUT], defaultdict[int, list[Trajectory]](list)
    assert isinstance(rollout, Rollout)
    for event in world.logs[ROLLOUT].events:
        message = decode(event.frame).message
        try:
            rollout.decide(event.time, message)
        except ProtocolError:
            continue
        changed = rollout.state_after(message)
        if isinstance(message, StartGroup):
            for trajectory_id in range(message.first_trajectory_id, message.first_trajectory_id + message.size):
                began[trajectory_id] = [rollout.trajectories[trajectory_id]]
        elif isinstance(changed, Trajectory) and changed.phase == "leasing":
            turns = began[changed.trajectory_id]
            turns += [changed] if changed.turn == len(turns) else []
    return began


def without_place(trajectories: list[Trajectory]) -> list[Trajectory]:
    return [replace(trajectory, executor="") for trajectory in trajectories]


def course(world: World, trajectory_id: int) -> Course:
    history = told_of(world.logs[ROLLOUT].events, trajectory_id, LOG)
    assert history is not None
    return course_of(world.rules, TOKENIZER, history)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_turn_begins_as_it_did(seed: int) -> None:
    world = live(seed)
    began = really_began(world)
    assert max(len(turns) for turns in began.values()) > 2
    for trajectory_id, turns in began.items():
        assert without_place(list(course(world, trajectory_id).beginnings)) == without_place(turns)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_ends_as_it_did(seed: int) -> None:
    """But for one that was lost with its executor: what it heard may tell nothing of that."""
    world = live(seed)
    ends = 0
    for event in world.logs[HEAD].events:
        message = decode(event.frame).message
        if world.logs[HEAD].decisions[event.seq].effects == REFUSED or event.actor != "buffer":
            continue
        if isinstance(message, TrajectoryFinished | TrajectoryAborted | TrajectoryFailed):
            ends += 1
            found = course(world, message.trajectory_id).end
            lost = isinstance(message, TrajectoryFailed) and not message.cause.startswith("engine")
            assert found == message or (lost and not isinstance(found, TrajectoryFinished))
    assert ends > 24


def test_of_two_lives_the_later_one_counts() -> None:
    world = live(1)
    events = world.logs[ROLLOUT].events
    once, twice = told_of(events, 5, LOG), told_of([*events, *events], 5, LOG)
    assert once == twice
    cut = next(place for place, event in enumerate(events) if event.trajectory == 5)
    again = told_of([*events, *events[:cut]], 5, LOG)
    assert again is not None and once is not None
    assert again.group == once.group
    assert len(again.events) < len(once.events)
    assert all(getattr(heard.message, "trajectory_id", None) is None for heard in again.events)


def test_of_a_trajectory_that_was_never_started_nothing_is_told() -> None:
    assert told_of(live(1).logs[ROLLOUT].events, 10_000, LOG) is None
