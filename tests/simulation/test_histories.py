"""Histories of trajectories, from the logs of runs with lost processes and duplicate messages.

A replayed history has the turn starts and the end of the original trajectory.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from msgspec.structs import replace

from actors.replay.logged_history import collect_history
from analysis.what_if.trajectory_replay import ReplayedTrajectory, replay_trajectory
from bus.addresses import HEAD, ROLLOUT
from bus.codec import decode
from bus.messages import ProtocolError, StartGroup, TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from policies.rollout.rollout import Rollout
from policies.rollout.trajectory import Trajectory
from tests.fakes import TOKENIZER
from tests.simulation.seeds import select_seeds
from tests.simulation.test_faults import live
from tests.simulation.world import World

LOG = Path("rollout-0.sqlite")  # name of the log in error messages
SEEDS = select_seeds(60, fast=(1, 2), per_change=6)  # odd seeds kill executors


def really_began(world: World) -> dict[int, list[Trajectory]]:
    """Replay the whole log and collect each trajectory at the start of each turn."""
    rollout, began = world.deciders()[ROLLOUT][ROLLOUT], defaultdict[int, list[Trajectory]](list)
    assert isinstance(rollout, Rollout)
    for event in world.logs[ROLLOUT].events:
        message = decode(event.frame).message
        try:
            rollout.decide(event.time, message)
        except ProtocolError:
            continue
        changed = rollout.get_state_after(message)
        if isinstance(message, StartGroup):
            for trajectory_id in range(message.first_trajectory_id, message.first_trajectory_id + message.size):
                began[trajectory_id] = [rollout.trajectories[trajectory_id]]
        elif isinstance(changed, Trajectory) and changed.phase == "leasing":
            turns = began[changed.trajectory_id]
            turns += [changed] if changed.turn == len(turns) else []
    return began


def without_place(trajectories: list[Trajectory]) -> list[Trajectory]:
    return [replace(trajectory, executor="") for trajectory in trajectories]


def course(world: World, trajectory_id: int) -> ReplayedTrajectory:
    history = collect_history(world.logs[ROLLOUT].events, trajectory_id, LOG)
    assert history is not None
    return replay_trajectory(world.rules, TOKENIZER, history)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_turn_starts_as_logged(seed: int) -> None:
    world = live(seed)
    began = really_began(world)
    assert max(len(turns) for turns in began.values()) > 2
    for trajectory_id, turns in began.items():
        assert without_place(list(course(world, trajectory_id).turn_starts)) == without_place(turns)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_trajectory_ends_as_logged(seed: int) -> None:
    """Trajectories lost with their executor are exempt: their events may not show the loss."""
    world = live(seed)
    ends = 0
    for event in world.logs[HEAD].events:
        message = decode(event.frame).message
        if world.logs[HEAD].decisions[event.seq].is_refused or event.actor != "buffer":
            continue
        if isinstance(message, TrajectoryFinished | TrajectoryAborted | TrajectoryFailed):
            ends += 1
            found = course(world, message.trajectory_id).end
            lost = isinstance(message, TrajectoryFailed) and not message.cause.startswith("engine")
            assert found == message or (lost and not isinstance(found, TrajectoryFinished))
    assert ends > 24


def test_the_later_of_two_incarnations_counts() -> None:
    world = live(1)
    events = world.logs[ROLLOUT].events
    once, twice = collect_history(events, 5, LOG), collect_history([*events, *events], 5, LOG)
    assert once == twice
    cut = next(place for place, event in enumerate(events) if event.trajectory == 5)
    again = collect_history([*events, *events[:cut]], 5, LOG)
    assert again is not None and once is not None
    assert again.group == once.group
    assert len(again.events) < len(once.events)
    assert all(getattr(heard.message, "trajectory_id", None) is None for heard in again.events)


def test_an_unstarted_trajectory_has_no_history() -> None:
    assert collect_history(live(1).logs[ROLLOUT].events, 10_000, LOG) is None
