"""All trajectories of one rollout process: each event goes to the one that it is about, each call to its executor.

While there is no executor, trajectories wait with their calls: no more than live here. One that leaves gives up what was
under way there, and nothing of what it may still have sent is taken: an answer counts if it comes from where the
trajectory is placed.

An engine that leaves takes the turns with it that it works on: their trajectories ask for another lease, and so does who
is granted one there afterwards. Lives are numbered, so that the word that one has left does no harm to the next.

A group that is aborted ends here. A lease may be on the way to one of its trajectories then; it is taken for late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec
from msgspec.structs import replace

from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CallFailed,
    CallsMoved,
    CodeFinished,
    CodeRequested,
    EngineLeft,
    ExecutorJoined,
    ExecutorLeft,
    GroupAborted,
    LeaseDeferred,
    LeaseGranted,
    ProtocolError,
    RunStarted,
    StartGroup,
    TurnFailed,
)
from policies.decider import Send
from policies.dialogue import TextTokenizer
from policies.placement import Load, Placement
from policies.trajectory import Rules, Trajectory, TrajectoryEvent
from policies.transitions import EXECUTOR, abort, advance, decline, displace, requests_of, start, take_over

REMEMBERED = 65_536  # aborted trajectories to which a lease may be on the way; one forgets the oldest beyond them
_TRAJECTORY_EVENTS: tuple[type, ...] = get_args(TrajectoryEvent)


class Placements(msgspec.Struct, frozen=True):
    """What is fingerprinted after an executor has joined or left."""

    loads: dict[str, Load]
    waiting: tuple[int, ...]


class Rollout:
    """A decider (policies.decider.Decider). Trajectories share nothing but the rules and the executors."""

    def __init__(self, rules: Rules, tokenizer: TextTokenizer) -> None:
        self._rules = rules
        self._tokenizer = tokenizer
        self._begin()

    def _begin(self) -> None:
        self.trajectories: dict[int, Trajectory] = {}  # the live ones
        self.placement = Placement()
        self.waiting: dict[int, None] = {}  # trajectories with calls and without an executor, in their order
        self._engines_left: dict[str, int] = {}  # the last life of each that is over
        self._unstarted = 0  # no trajectory with this number or a higher one was started
        self._leaseless: dict[int, None] = {}  # aborted while they waited for a lease
        self._last: Trajectory | None = None

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():
                self._begin()
                return []
            case StartGroup():
                return self._start(now, event)
            case GroupAborted():
                return self._abort(now, event)
            case ExecutorJoined():
                return self._join(event)
            case ExecutorLeft():
                return self._leave(event)
            case EngineLeft():
                return self._lose_engine(now, event)
            case _ if isinstance(event, _TRAJECTORY_EVENTS):
                return self._advance(now, event)  # pyright: ignore[reportArgumentType] - narrowed by the tuple
            case _:
                raise ProtocolError(f"a rollout process has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        """The one trajectory that the event changed; of an executor's coming and going, who works and who waits."""
        if isinstance(event, ExecutorJoined | ExecutorLeft):
            return Placements(self.placement.loads, tuple(self.waiting))
        return self._last

    def adopt(self, now: float, trajectory: Trajectory) -> list[Send]:
        """Go on with a trajectory from elsewhere, which is to begin a turn."""
        adopted, effects = take_over(self._rules, trajectory, now)
        self.trajectories[adopted.trajectory_id] = adopted
        self._unstarted = max(self._unstarted, adopted.trajectory_id + 1)
        return effects

    # ---------------------------------------------------------------- trajectories

    def _start(self, now: float, group: StartGroup) -> list[Send]:
        ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
        if ids.start < self._unstarted:  # they are numbered in the order in which they are started
            raise ProtocolError(f"group {group.group_id} was started before")
        effects: list[Send] = []
        for trajectory_id in ids:
            self.trajectories[trajectory_id], sends = start(self._rules, group, trajectory_id, now)
            effects += sends
        self._unstarted = ids.stop
        self._last = None
        return effects

    def _advance(self, now: float, event: TrajectoryEvent) -> list[Send]:
        trajectory = self.trajectories.get(event.trajectory_id)
        if isinstance(event, LeaseGranted | LeaseDeferred) and event.trajectory_id in self._leaseless:
            self._last = None
            return []
        if isinstance(event, CodeFinished | CallFailed | AnswerGraded) and self._is_late(trajectory, event):
            self._last = trajectory
            return []
        if trajectory is None:
            raise ProtocolError(f"trajectory {event.trajectory_id} does not live here")
        if isinstance(event, LeaseGranted) and event.life <= self._engines_left.get(event.engine, 0):
            return self._change(trajectory, *decline(self._rules, trajectory, event))
        after, sends = advance(self._rules, self._tokenizer, trajectory, now, event)
        if trajectory.executor and isinstance(event, CodeFinished | CallFailed | AnswerGraded):
            self.placement.answered(trajectory.executor, failed=isinstance(event, CallFailed))
        return self._change(trajectory, after, sends)

    def _change(self, before: Trajectory, after: Trajectory, sends: Sequence[Send]) -> list[Send]:
        if before.executor:
            self.placement.book(before.executor, len(after.open_calls) - len(before.open_calls))
        self._last, effects = self._routed(after, sends)
        self._keep(self._last)
        return effects

    def _abort(self, now: float, group: GroupAborted) -> list[Send]:
        """Those that have ended meanwhile have said so."""
        self._last = None
        effects: list[Send] = []
        for trajectory_id in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
            trajectory = self.trajectories.get(trajectory_id)
            if trajectory is None or trajectory.aborted:
                continue
            if trajectory.phase == "leasing":
                self._leaseless[trajectory_id] = None
            after, sends = abort(self._rules, trajectory, now, group.cause)
            effects += self._change(trajectory, after, sends)
        while len(self._leaseless) > REMEMBERED:
            del self._leaseless[next(iter(self._leaseless))]
        return effects

    def _lose_engine(self, now: float, left: EngineLeft) -> list[Send]:
        """What it was asked for is asked for again, once, as after any failure."""
        if left.life <= self._engines_left.get(left.engine, 0):
            raise ProtocolError(f"life {left.life} of {left.engine} was over before")
        self._engines_left[left.engine] = left.life
        effects: list[Send] = []
        for each in list(self.trajectories.values()):
            if each.phase == "generating" and each.engine == left.engine and each.engine_life <= left.life:
                failed = TurnFailed(each.trajectory_id, each.turn, each.lease, f"engine left: {left.cause}")
                effects += self._change(each, *advance(self._rules, self._tokenizer, each, now, failed))
        self._last = None
        return effects

    def _is_late(self, trajectory: Trajectory | None, event: CodeFinished | CallFailed | AnswerGraded) -> bool:
        """An answer that crossed the end of its trajectory, or of its executor, on the way."""
        if trajectory is None:
            return event.trajectory_id < self._unstarted
        return event.executor != trajectory.executor

    def _keep(self, trajectory: Trajectory) -> None:
        if trajectory.phase == "ended":
            self.trajectories.pop(trajectory.trajectory_id)
            self.waiting.pop(trajectory.trajectory_id, None)
        else:
            self.trajectories[trajectory.trajectory_id] = trajectory

    # ---------------------------------------------------------------- executors

    def _routed(self, trajectory: Trajectory, sends: Sequence[Send]) -> tuple[Trajectory, list[Send]]:
        """The effects with their executor's address; a trajectory without one is placed, or waits."""
        if trajectory.executor:
            return trajectory, [
                Send(trajectory.executor, send.message) if send.to == EXECUTOR else send for send in sends
            ]
        others = [send for send in sends if send.to != EXECUTOR]
        placed, requests = self._place(trajectory)
        return placed, [*others, *requests]

    def _place(self, trajectory: Trajectory) -> tuple[Trajectory, list[Send]]:
        """Needed by a trajectory that waits for calls; any other one stays as it is."""
        if not trajectory.open_calls:
            return trajectory, []
        executor = self.placement.least_busy()
        if executor is None:
            self.waiting[trajectory.trajectory_id] = None
            return trajectory, []
        self.placement.book(executor, len(trajectory.open_calls))
        requests = [Send(executor, request) for request in requests_of(trajectory)]
        return replace(trajectory, executor=executor), requests

    def _join(self, event: ExecutorJoined) -> list[Send]:
        self.placement.join(event)
        waiting, self.waiting = self.waiting, {}
        effects: list[Send] = []
        for trajectory_id in waiting:
            self.trajectories[trajectory_id], requests = self._place(self.trajectories[trajectory_id])
            effects += requests
        return self._reported(event.executor, effects, lost=0)

    def _leave(self, event: ExecutorLeft) -> list[Send]:
        self.placement.leave(event.executor)
        displaced = [each for each in self.trajectories.values() if each.executor == event.executor]
        effects: list[Send] = []
        for trajectory in displaced:
            after, sends = displace(self._rules, trajectory, f"executor left: {event.cause}")
            placed, routed = self._routed(after, sends)
            self._keep(placed)
            effects += routed
        lost = sum(each.trajectory_id not in self.trajectories for each in displaced)
        return self._reported(event.executor, effects, lost)

    def _reported(self, executor: str, effects: list[Send], lost: int) -> list[Send]:
        sent = sum(isinstance(effect.message, CodeRequested | AnswerSubmitted) for effect in effects)
        if not (sent or lost or self.waiting):
            return effects
        return [*effects, Send(self._rules.launcher, CallsMoved(executor, sent, len(self.waiting), lost))]
