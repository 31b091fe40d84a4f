"""Replays one trajectory from its rollout process's log: the states at turn starts and at the end.

The transitions are those of the run (policies.rollout.transitions), and an event counts if
policies.rollout.rollout accepts it. Placement is not tracked: the sender of a result identifies the
executor, which answers only its own requests. Retries after an executor left end with the phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, get_args

from msgspec.structs import replace

from bus.messages import (
    AnswerGraded,
    AnyMessage,
    CallFailed,
    CodeFinished,
    CodeOk,
    EngineLeft,
    ExecutorLeft,
    GroupAborted,
    LeaseGranted,
    Output,
    ProtocolError,
    StartGroup,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnFailed,
)
from policies.dialogue.chat_format import TextTokenizer
from policies.rollout.trajectory import Rules, Trajectory, TrajectoryEvent
from policies.rollout.transitions import Transition, abort, advance, decline_lease, start
from policies.seeded_random import BRANCH, mix

TrajectoryEnd = TrajectoryFinished | TrajectoryFailed | TrajectoryAborted
_TRAJECTORY_EVENTS: tuple[type, ...] = get_args(TrajectoryEvent)


class LoggedEvent(NamedTuple):
    """One event, at `time` seconds."""

    time: float
    message: AnyMessage


class TrajectoryHistory(NamedTuple):
    """Events of one trajectory and of its group, and departures of engines and executors."""

    trajectory_id: int
    group: StartGroup
    started_at: float
    events: Sequence[LoggedEvent]


class ReplayedTrajectory(NamedTuple):
    turn_starts: Sequence[Trajectory]  # states at the start of turns 0, 1, ...
    final: Trajectory
    end: TrajectoryEnd | None  # None: the log ends before the trajectory


def replay_trajectory(rules: Rules, tokenizer: TextTokenizer, history: TrajectoryHistory) -> ReplayedTrajectory:
    replayer = _TrajectoryReplayer(rules, tokenizer, history)
    turn_starts = [replayer.trajectory]
    for logged in history.events:
        replayer.apply(logged)
        if replayer.trajectory.phase == "leasing" and replayer.trajectory.turn == len(turn_starts):
            turn_starts.append(replayer.trajectory)
    return ReplayedTrajectory(turn_starts, replayer.trajectory, replayer.end)


def replace_call_result(
    rules: Rules, tokenizer: TextTokenizer, history: TrajectoryHistory, turn: int, stdout: str
) -> TrajectoryHistory:
    """The history in which the last call before `turn` succeeded and printed `stdout`.

    Raises LookupError if the turn before ran no call.
    """
    replaced = _find_last_result_before(rules, tokenizer, history, turn)
    if replaced is None:
        raise LookupError(f"turn {turn - 1} ran no call")
    place, finished = replaced
    events = list(history.events)
    events[place] = LoggedEvent(events[place].time, replace(finished, outcome=CodeOk(Output(stdout))))
    return history._replace(events=events)


def fork_trajectories(trajectory: Trajectory, count: int, seed: int | None) -> list[Trajectory]:
    """`count` copies of the trajectory, each in a group with another seed.

    The first copy has the trajectory's own seed or `seed`; the others have seeds derived from it.
    """
    group = trajectory.group
    first = group.seed if seed is None else seed
    seeds = [first, *(mix(first, BRANCH, number) for number in range(1, count))]
    return [
        replace(
            trajectory,
            # Each copy has its own notebook; the number seeds the random draws of its calls.
            trajectory_id=trajectory.trajectory_id + number,
            group=replace(group, seed=each, first_trajectory_id=group.first_trajectory_id + number),
        )
        for number, each in enumerate(seeds)
    ]


def _find_last_result_before(
    rules: Rules, tokenizer: TextTokenizer, history: TrajectoryHistory, turn: int
) -> tuple[int, CodeFinished] | None:
    """Index and message of the result of the last call in the turn before `turn`."""
    replayer = _TrajectoryReplayer(rules, tokenizer, history)
    found: tuple[int, CodeFinished] | None = None
    for place, logged in enumerate(history.events):
        calling = replayer.trajectory.phase == "calling" and replayer.trajectory.turn == turn
        counted = replayer.apply(logged)
        if counted and calling and isinstance(logged.message, CodeFinished):
            found = max(found or (place, logged.message), (place, logged.message), key=lambda each: each[1].call)
    return found


class _TrajectoryReplayer:
    """Applies the logged events to the trajectory."""

    def __init__(self, rules: Rules, tokenizer: TextTokenizer, history: TrajectoryHistory) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._departed_engines: dict[str, int] = {}  # latest incarnation that left, by engine
        self._departed_executors: set[str] = set()
        self.end: TrajectoryEnd | None = None
        self.trajectory, _ = start(rules, history.group, history.trajectory_id, history.started_at)

    def apply(self, logged: LoggedEvent) -> bool:
        """Applies an event; returns whether the trajectory accepted it."""
        if self.trajectory.phase == "ended":
            return False
        try:
            step = self._advance(logged.time, logged.message)
        except ProtocolError:  # the run refused it too
            return False
        if step is None:
            return False
        self.trajectory, sends = step
        ends = [send.message for send in sends if isinstance(send.message, TrajectoryEnd)]
        self.end = ends[0] if ends else None
        return True

    def _advance(self, now: float, event: AnyMessage) -> Transition | None:
        trajectory = self.trajectory
        match event:
            case ExecutorLeft(executor=executor):
                self._departed_executors.add(executor)
                return None
            case EngineLeft():
                return self._on_engine_left(now, event)
            case GroupAborted(cause=cause):
                return None if trajectory.aborted else abort(self._rules, trajectory, now, cause)
            case LeaseGranted() if event.incarnation <= self._departed_engines.get(event.engine, 0):
                return decline_lease(self._rules, trajectory, event)
            case CodeFinished() | CallFailed() | AnswerGraded() if event.executor in self._departed_executors:
                return None
            case _ if isinstance(event, _TRAJECTORY_EVENTS):
                # The tuple narrows the type.
                return advance(self._rules, self._tokenizer, trajectory, now, event)  # pyright: ignore[reportArgumentType]
            case _:
                return None

    def _on_engine_left(self, now: float, event: EngineLeft) -> Transition | None:
        trajectory = self.trajectory
        self._departed_engines[event.engine] = max(event.incarnation, self._departed_engines.get(event.engine, 0))
        works_there = trajectory.phase == "generating" and trajectory.engine == event.engine
        if not works_there or trajectory.engine_incarnation > event.incarnation:
            return None
        failed = TurnFailed(trajectory.trajectory_id, trajectory.turn, trajectory.lease, f"engine left: {event.cause}")
        return advance(self._rules, self._tokenizer, trajectory, now, failed)
