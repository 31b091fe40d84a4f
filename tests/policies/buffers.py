"""A group buffer that is played with: what is asked of it, what ends, and what it sends."""

from __future__ import annotations

from msgspec.structs import replace

from bus.messages import (
    BatchReady,
    GroupAborted,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.schema import Rl, Roc, Run
from policies.decider import Send
from policies.group_buffer import GroupBuffer, Problem
from policies.record import ids_to_bytes
from tests.policies.groups import finished

TRAIN = [Problem(f"train:{number}", str(number), bytes(8)) for number in range(99)]
MIXED = (1.0, 0.0)


def run_of(**rl: object) -> Run:
    settings: dict[str, object] = {"steps": 9, "prompts": 2, "rollouts": 2, "refills": 0, "max_staleness": 1}
    return Run(name="test", rl=Rl(**settings | rl), roc=Roc(enabled=False))  # pyright: ignore[reportArgumentType]


def of_versions(trajectory_id: int, *versions: int, reward: float = 1.0, group_id: int = 0) -> TrajectoryFinished:
    """Three prompt tokens, and a generated one of each version."""
    count = 3 + len(versions)
    return replace(
        finished(trajectory_id, reward, group_id=group_id),
        token_ids=bytes(4 * count),
        loss_mask=b"\0\0\0" + b"\1" * len(versions),
        logprobs=bytes(4 * count),
        versions=ids_to_bytes([-1, -1, -1, *versions]),
    )


def starts(effects: list[Send]) -> list[StartGroup]:
    return [send.message for send in effects if isinstance(send.message, StartGroup)]


def stops(effects: list[Send]) -> list[GroupAborted]:
    return [send.message for send in effects if isinstance(send.message, GroupAborted)]


def batches(effects: list[Send]) -> list[BatchReady]:
    return [send.message for send in effects if isinstance(send.message, BatchReady)]


def collected(effects: list[Send]) -> StepCollected:
    return next(send.message for send in effects if isinstance(send.message, StepCollected))


class Play:
    """A group buffer, and the groups that it has started."""

    def __init__(self, run: Run) -> None:
        self.buffer = GroupBuffer(run, TRAIN, TRAIN[:2])
        self.groups: dict[int, StartGroup] = {}

    def ask(self, step: int, version: int = 0) -> list[Send]:
        return self.hear(StepRequested(step, version))

    def hear(self, event: StepRequested | TrajectoryFinished | TrajectoryFailed | TrajectoryAborted) -> list[Send]:
        effects = list(self.buffer.decide(0.0, event))
        self.groups |= {group.group_id: group for group in starts(effects)}
        return effects

    def end(self, group_id: int, *versions: int, rewards: tuple[float, ...] = MIXED) -> list[Send]:
        """All of the group's trajectories, each with tokens of these versions."""
        first = self.groups[group_id].first_trajectory_id
        return [
            effect
            for place, reward in enumerate(rewards)
            for effect in self.hear(of_versions(first + place, *versions, reward=reward, group_id=group_id))
        ]
