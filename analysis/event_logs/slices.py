"""What took how long, from event logs: each trajectory's phases, each engine's turns, each executor's calls, the steps.

A stretch between two events of a trajectory is the phase that the later one ends: a lease that is granted ends a wait for
it, a turn that is generated ends a generation, a result ends a call, a grade ends a grading.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from analysis.event_logs.merging import Choice, Logged, began_at, merged
from bus.messages import (
    AnswerGraded,
    AnyMessage,
    CallFailed,
    CodeFinished,
    EvaluationFinished,
    EvaluationRequested,
    LeaseDeferred,
    LeaseGranted,
    StartGroup,
    StepCollected,
    StepRequested,
    StepTrained,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnFailed,
    TurnGenerated,
    WeightsLoaded,
)
from configs.errors import UnusableInput
from configs.run_folder import RunFolder

STEPS, LEARNER, TRAJECTORIES = "steps", "learner", "trajectories"
_KINDS = (
    *(StartGroup, LeaseGranted, LeaseDeferred, TurnGenerated, TurnFailed, CodeFinished, CallFailed, AnswerGraded),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted),
    *(EvaluationRequested, EvaluationFinished, StepRequested, StepCollected, StepTrained, WeightsLoaded),
)


class Slice(NamedTuple):
    """Times in seconds since the run began."""

    track: str  # a process, or TRAJECTORIES, STEPS, LEARNER
    begin: float
    end: float
    name: str
    trajectory: int | None = None


class _Live(msgspec.Struct):
    """A trajectory under way."""

    began: float
    problem: str
    since: float  # its last event
    phase: str = ""  # of the stretch before that
    phase_began: float = 0.0
    engine: str = ""
    granted: float = 0.0
    turn: int = 0


def slices_of(folder: RunFolder) -> list[Slice]:
    """Raises UnusableInput if there is no log."""
    began = began_at(folder)
    found = _Slices()
    for logged in merged(folder, Choice(kinds=tuple(kind.__name__ for kind in _KINDS))):
        found.take(logged, logged.event.time - began)
    found.end()
    return found.slices


def of_step(slices: list[Slice], step: int) -> list[Slice]:
    """Those that have a part in the step's time. Raises UnusableInput if there is no such step."""
    span = next((each for each in slices if each.track == STEPS and each.name == f"step {step}"), None)
    if span is None:
        raise UnusableInput(f"--step {step}: the logs have no step {step} that has come to its end")
    return [each for each in slices if each.begin < span.end and each.end > span.begin]


class _Slices:
    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self._live: dict[int, _Live] = {}
        self._asked: dict[str, float] = {}  # steps and evaluations, by name
        self._collected: dict[int, float] = {}
        self._trained_at = 0.0
        self._now = 0.0

    def take(self, logged: Logged, at: float) -> None:
        self._now = at
        message, trajectory = logged.envelope.message, logged.event.trajectory
        if isinstance(message, StartGroup):
            for number in range(message.first_trajectory_id, message.first_trajectory_id + message.size):
                if number in self._live:  # the run was broken off, and a later life of it starts the same again
                    self._end(number, "abandoned", at=self._live[number].since)
                self._live[number] = _Live(at, message.problem, at)
        elif trajectory is None:
            self._take_step(logged, message, at)
        elif trajectory in self._live:  # else it is late: the trajectory has ended
            self._take_trajectory(trajectory, self._live[trajectory], message, at)

    def end(self) -> None:
        """What goes on ends with the log."""
        for trajectory in list(self._live):
            self._end(trajectory, "under way", self._now)

    # ---------------------------------------------------------------- trajectories

    def _take_trajectory(self, trajectory: int, live: _Live, message: AnyMessage, at: float) -> None:
        match message:
            case LeaseGranted():
                self._phase(trajectory, live, "leasing", at)
                live.engine, live.granted = message.engine, at
            case LeaseDeferred():
                self._phase(trajectory, live, "leasing", at)
            case TurnGenerated() | TurnFailed():
                live.turn = message.turn
                self._phase(trajectory, live, f"generating turn {message.turn}", at)
                name = f"trajectory {trajectory}, turn {message.turn}"
                self.slices.append(Slice(live.engine, live.granted, at, name, trajectory))
            case CodeFinished():
                self._phase(trajectory, live, f"calling in turn {live.turn}", at)
                self._work(message, f"call {message.call}", at)
            case CallFailed():
                self._phase(trajectory, live, "grading" if message.call < 0 else f"calling in turn {live.turn}", at)
            case AnswerGraded():
                self._phase(trajectory, live, "grading", at)
                self._work(message, "grading", at)
            case TrajectoryFinished():
                self._end(trajectory, f"{message.ending}, reward {message.reward:g}", live.since)
            case TrajectoryFailed() | TrajectoryAborted():
                self._end(trajectory, message.cause, at)
            case _:
                pass

    def _phase(self, trajectory: int, live: _Live, phase: str, at: float) -> None:
        if phase != live.phase:
            self._close_phase(trajectory, live)
            live.phase, live.phase_began = phase, live.since
        live.since = at

    def _close_phase(self, trajectory: int, live: _Live) -> None:
        if live.phase:
            self.slices.append(Slice(TRAJECTORIES, live.phase_began, live.since, live.phase, trajectory))

    def _end(self, trajectory: int, how: str, at: float) -> None:
        live = self._live.pop(trajectory)
        self._close_phase(trajectory, live)
        name = f"trajectory {trajectory} on {live.problem}: {how}"
        self.slices.append(Slice(TRAJECTORIES, live.began, max(at, live.since), name, trajectory))

    def _work(self, done: CodeFinished | AnswerGraded, what: str, at: float) -> None:
        name = f"trajectory {done.trajectory_id}, {what}"
        self.slices.append(Slice(done.executor, max(0.0, at - done.duration_s), at, name, done.trajectory_id))

    # ---------------------------------------------------------------- steps

    def _take_step(self, logged: Logged, message: AnyMessage, at: float) -> None:
        if logged.event.actor == "recorder":  # what others hear of as well
            return
        for slice_ in self._steps(message, at):
            self.slices.append(slice_)

    def _steps(self, message: AnyMessage, at: float) -> Iterator[Slice]:
        match message:
            case StepRequested():
                self._asked[f"step {message.step}"] = at
            case EvaluationRequested():
                self._asked[f"evaluation {message.label}"] = at
            case EvaluationFinished():
                yield from self._span(f"evaluation {message.label}", at)
            case StepCollected():
                self._collected[message.step] = at
            case StepTrained(step=0):
                yield Slice(LEARNER, max(0.0, at - message.metrics.get("sft_s", 0.0)), at, "cold start")
                self._trained_at = at
            case StepTrained():
                begin = max(self._trained_at, self._collected.get(message.step, at))
                yield Slice(LEARNER, begin, at, f"step {message.step}")
                self._trained_at = at
            case WeightsLoaded():
                yield from self._span(f"step {message.version}", at)  # with the first engine; others may follow
            case _:
                pass

    def _span(self, name: str, at: float) -> Iterator[Slice]:
        if name in self._asked:
            yield Slice(STEPS, self._asked.pop(name), at, name)
