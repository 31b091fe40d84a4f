"""One trajectory again, from what its rollout process received: as it stood when each turn began, and as its log leaves it.

The transitions are the ones that it went through (policies.transitions); which events count is decided as policies.rollout
decides it. Where it was placed is not followed, but read from who answered: an executor that has not left answers to
what it was asked alone. What an executor's leaving makes of retries does not outlast the phase.
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
from policies.dialogue import TextTokenizer
from policies.draws import BRANCH, mix
from policies.trajectory import Rules, Trajectory, TrajectoryEvent
from policies.transitions import Step, abort, advance, decline, start

End = TrajectoryFinished | TrajectoryFailed | TrajectoryAborted
_TRAJECTORY_EVENTS: tuple[type, ...] = get_args(TrajectoryEvent)


class Heard(NamedTuple):
    """One event, at `time` seconds."""

    time: float
    message: AnyMessage


class History(NamedTuple):
    """What may concern one trajectory: its own events, its group's, and of the engines and executors who left."""

    trajectory_id: int
    group: StartGroup
    began: float
    events: Sequence[Heard]


class Course(NamedTuple):
    """What became of a trajectory."""

    beginnings: Sequence[Trajectory]  # as it stood when turn 0, 1, ... began
    last: Trajectory
    end: End | None  # None: the log ends before it does


def course_of(rules: Rules, tokenizer: TextTokenizer, history: History) -> Course:
    again = _Again(rules, tokenizer, history)
    beginnings = [again.trajectory]
    for heard in history.events:
        again.take(heard)
        if again.trajectory.phase == "leasing" and again.trajectory.turn == len(beginnings):
            beginnings.append(again.trajectory)
    return Course(beginnings, again.trajectory, again.end)


def with_result(rules: Rules, tokenizer: TextTokenizer, history: History, turn: int, printed: str) -> History:
    """The same, but for what the last call of the turn before `turn` came to: it ended well and printed `printed`.

    Raises LookupError if the turn before ran no call.
    """
    replaced = _last_result_before(rules, tokenizer, history, turn)
    if replaced is None:
        raise LookupError(f"turn {turn - 1} ran no call")
    place, finished = replaced
    events = list(history.events)
    events[place] = Heard(events[place].time, replace(finished, outcome=CodeOk(Output(printed))))
    return history._replace(events=events)


def branches(trajectory: Trajectory, count: int, seed: int | None) -> list[Trajectory]:
    """So many times the same trajectory, each as of a group with another seed.

    The first draws as the trajectory itself does, or by `seed`; the others by seeds that are derived from the same one.
    """
    group = trajectory.group
    first = group.seed if seed is None else seed
    seeds = [first, *(mix(first, BRANCH, number) for number in range(1, count))]
    return [
        replace(
            trajectory,
            trajectory_id=trajectory.trajectory_id + number,  # a notebook each, whose calls draw by this number
            group=replace(group, seed=each, first_trajectory_id=group.first_trajectory_id + number),
        )
        for number, each in enumerate(seeds)
    ]


def _last_result_before(
    rules: Rules, tokenizer: TextTokenizer, history: History, turn: int
) -> tuple[int, CodeFinished] | None:
    """Of the calls of the turn before `turn` that of the last one: its place among the events, and what it was."""
    again = _Again(rules, tokenizer, history)
    found: tuple[int, CodeFinished] | None = None
    for place, heard in enumerate(history.events):
        calling = again.trajectory.phase == "calling" and again.trajectory.turn == turn
        counted = again.take(heard)
        if counted and calling and isinstance(heard.message, CodeFinished):
            found = max(found or (place, heard.message), (place, heard.message), key=lambda each: each[1].call)
    return found


class _Again:
    """The trajectory, which goes through its events once more."""

    def __init__(self, rules: Rules, tokenizer: TextTokenizer, history: History) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._engines_left: dict[str, int] = {}  # the last life of each that is over
        self._executors_left: set[str] = set()
        self.end: End | None = None
        self.trajectory, _ = start(rules, history.group, history.trajectory_id, history.began)

    def take(self, heard: Heard) -> bool:
        """Whether the event counted."""
        if self.trajectory.phase == "ended":
            return False
        try:
            step = self._step(heard.time, heard.message)
        except ProtocolError:  # it was refused then as well
            return False
        if step is None:
            return False
        self.trajectory, sends = step
        ends = [send.message for send in sends if isinstance(send.message, End)]
        self.end = ends[0] if ends else None
        return True

    def _step(self, now: float, event: AnyMessage) -> Step | None:
        trajectory = self.trajectory
        match event:
            case ExecutorLeft(executor=executor):
                self._executors_left.add(executor)
                return None
            case EngineLeft():
                return self._lose_engine(now, event)
            case GroupAborted(cause=cause):
                return None if trajectory.aborted else abort(self._rules, trajectory, now, cause)
            case LeaseGranted() if event.life <= self._engines_left.get(event.engine, 0):
                return decline(self._rules, trajectory, event)
            case CodeFinished() | CallFailed() | AnswerGraded() if event.executor in self._executors_left:
                return None
            case _ if isinstance(event, _TRAJECTORY_EVENTS):
                return advance(self._rules, self._tokenizer, trajectory, now, event)  # pyright: ignore[reportArgumentType] - narrowed by the tuple
            case _:
                return None

    def _lose_engine(self, now: float, left: EngineLeft) -> Step | None:
        trajectory = self.trajectory
        self._engines_left[left.engine] = max(left.life, self._engines_left.get(left.engine, 0))
        works_there = trajectory.phase == "generating" and trajectory.engine == left.engine
        if not works_there or trajectory.engine_life > left.life:
            return None
        failed = TurnFailed(trajectory.trajectory_id, trajectory.turn, trajectory.lease, f"engine left: {left.cause}")
        return advance(self._rules, self._tokenizer, trajectory, now, failed)
