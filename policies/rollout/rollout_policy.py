"""Rollout policies start and advance the trajectories of a group. `rl.rollout_policy` selects the policy.

The rollout process calls `start` once for each group, and `advance` for each event of a live trajectory. Both return
transitions: a trajectory's next state with the messages to send. The default policy starts all trajectories at once,
and advances each trajectory alone. examples/rollout_policies.py contains best-of-n, tree search and a fixed number of
turns; docs/tasks.md explains them.

A policy is part of a decider, and a replay repeats its decisions. So a policy may keep a state of its own, but must not
read a clock, a file or a random source (asterism.policies.seeded_random has seeded draws). Every trajectory of a group
must end exactly once.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, cast

from msgspec.structs import replace

from asterism.bus.messages import ExecutorLeft, StartGroup, build_blank_record
from asterism.configs.import_path import load_object
from asterism.configs.schema.algorithm import RlConfig
from asterism.policies.rollout import transitions
from asterism.policies.rollout.endings import Transition
from asterism.policies.rollout.trajectory import Rules, Trajectory, TrajectoryEvent


class RolloutPolicy(Protocol):
    """The interface of policies. Each rollout process makes one policy object at the start of the run."""

    def start(self, rules: Rules, group: StartGroup, now: float) -> list[Transition]:
        """Return one transition for each trajectory of the group, in the order of their ids."""
        ...

    def advance(
        self,
        rules: Rules,
        trajectory: Trajectory,
        now: float,
        event: TrajectoryEvent | ExecutorLeft,
        live: Mapping[int, Trajectory],
    ) -> list[Transition]:
        """Return the transition of the event's trajectory, and the transitions of siblings that change with it.

        `live` contains all live trajectories by id. The ids of the group are `list_siblings(trajectory.group)`.
        Raises ProtocolError for an event that the trajectory's phase does not accept.
        """
        ...


class IndependentTrajectories:
    """The default policy."""

    def start(self, rules: Rules, group: StartGroup, now: float) -> list[Transition]:
        return [transitions.start(rules, group, each, now) for each in list_siblings(group)]

    def advance(
        self,
        rules: Rules,
        trajectory: Trajectory,
        now: float,
        event: TrajectoryEvent | ExecutorLeft,
        live: Mapping[int, Trajectory],
    ) -> list[Transition]:
        return [transitions.advance(rules, trajectory, now, event)]


POLICIES: dict[str, Callable[[], RolloutPolicy]] = {"independent": IndependentTrajectories}


def load_rollout_policy(rl: RlConfig) -> Callable[[], RolloutPolicy]:
    """Return the class or function that makes the policy. Raises UnusableInput."""
    if rl.rollout_policy in POLICIES:
        return POLICIES[rl.rollout_policy]
    return cast(Callable[[], RolloutPolicy], load_object(rl.rollout_policy, "rl.rollout_policy"))


# ---------------------------------------------------------------- parts of policies


def list_siblings(group: StartGroup) -> range:
    """Return the ids of the group's trajectories."""
    return range(group.first_trajectory_id, group.first_trajectory_id + group.size)


def park(group: StartGroup, trajectory_id: int, now: float) -> Transition:
    """Return a trajectory that waits without a lease until a policy calls `branch` or `transitions.start`."""
    record = build_blank_record(group.prompt_ids)
    return Trajectory(trajectory_id=trajectory_id, group=group, record=record, since=now, holds_lease=False), []


def is_parked(trajectory: Trajectory) -> bool:
    return trajectory.phase == "leasing" and trajectory.lease == 0 and not trajectory.holds_lease


def branch(rules: Rules, parked: Trajectory, source: Trajectory, now: float) -> Transition:
    """Continue a parked trajectory from the turns, notebook and environment of a sibling that is between two turns.

    The parked trajectory has its own seed, so its next tokens differ from the sibling's.
    """
    copied = replace(
        source, trajectory_id=parked.trajectory_id, waits=parked.waits, retries=0, retried_calls=(), has_session=False
    )
    return transitions.adopt(rules, copied, now)
