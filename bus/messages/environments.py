"""Calls of tools, environments and dialogues: messages between the rollout process and the executors."""

from collections.abc import Mapping
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from asterism.bus.messages.message import Message

OPENING_CALL = -2  # the number of the call that creates an instance: `reset`, or `init` of a dialogue


class EnvironmentCalled(Message, frozen=True):
    """rollout -> executor: call a tool, or a method of the trajectory's instance."""

    trajectory_id: int
    call: int  # counts the trajectory's calls from 0, together with CodeRequested; or OPENING_CALL
    task: str
    method: str  # name of the tool; "step" for a turn of a dialogue; empty for the opening
    arguments: bytes  # a JSON object: the arguments; for the opening the row of data


class Observation(Message, frozen=True):
    """The result of a call, which the model reads."""

    content: str
    stop: bool = False  # whether the trajectory ends
    rewards: dict[str, float] = msgspec.field(default_factory=dict)  # components of the reward, by name
    metrics: dict[str, float] = msgspec.field(default_factory=dict)  # reported values that are not part of the reward


class EnvironmentRaised(Message, frozen=True):
    """The error of a call that raised an exception. The model reads its text."""

    error: str


class EnvironmentTimedOut(Message, frozen=True):
    limit_s: float


EnvironmentOutcome = Observation | EnvironmentRaised | EnvironmentTimedOut


def digest_outcome(outcome: EnvironmentOutcome) -> bytes:
    """Return a digest of the text that the model reads, to compare a repeated call with the first one."""
    seen = replace(outcome, rewards={}, metrics={}) if isinstance(outcome, Observation) else outcome
    return blake2b(msgspec.msgpack.encode(seen), digest_size=8).digest()


class EnvironmentReturned(Message, frozen=True):
    """executor -> rollout: the call has ended."""

    trajectory_id: int
    call: int
    outcome: EnvironmentOutcome
    duration_s: float
    executor: str  # incarnation that ran the call, as in ExecutorJoined


class AnsweredCall(msgspec.Struct, frozen=True, array_like=True):
    """An earlier call of an instance."""

    method: str
    arguments: bytes
    digest: bytes  # digest of the outcome


class EnvironmentRestored(Message, frozen=True):
    """rollout -> executor, before the first call on this executor: the instance that the trajectory had on another. The
    executor repeats the calls if the task is replayable."""

    trajectory_id: int
    task: str
    calls: tuple[AnsweredCall, ...]  # calls in order; the first call is the opening


class EnvironmentHistory(msgspec.Struct, frozen=True, array_like=True):
    """The calls of a trajectory's instance and the sums of their results."""

    calls: tuple[AnsweredCall, ...] = ()  # the first call is the opening
    rewards: dict[str, float] = {}  # sums of reward components over the calls, by name
    metrics: dict[str, float] = {}

    def add_call(self, call: AnsweredCall, outcome: EnvironmentOutcome) -> "EnvironmentHistory":
        calls = (*self.calls, call)
        if not isinstance(outcome, Observation):
            return replace(self, calls=calls)
        rewards, metrics = add_by_name(self.rewards, outcome.rewards), add_by_name(self.metrics, outcome.metrics)
        return EnvironmentHistory(calls, rewards, metrics)


def add_by_name(sums: Mapping[str, float], values: Mapping[str, float]) -> dict[str, float]:
    return {**sums, **{name: sums.get(name, 0.0) + value for name, value in values.items()}}


EnvironmentMessage = EnvironmentCalled | EnvironmentReturned | EnvironmentRestored
