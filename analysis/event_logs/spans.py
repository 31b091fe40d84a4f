"""Builds time spans from event logs: trajectory phases, turns, calls, learner steps, run steps.

The later of two events of a trajectory names the phase between them: a granted lease ends a wait, a
generated turn ends a generation, a result ends a call, a grade ends a grading.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from asterism.analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events, read_start_time
from asterism.bus.messages import (
    OPENING_CALL,
    AnswerGraded,
    AnyMessage,
    CallFailed,
    CodeFinished,
    EnvironmentReturned,
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
    name_evaluation,
)
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.policies.rollout.trajectory import GRADING_CALL

STEPS, LEARNER, TRAJECTORIES = "steps", "learner", "trajectories"
_KINDS = (
    *(
        StartGroup,
        LeaseGranted,
        LeaseDeferred,
        TurnGenerated,
        TurnFailed,
        CodeFinished,
        EnvironmentReturned,
        CallFailed,
        AnswerGraded,
    ),
    *(TrajectoryFinished, TrajectoryFailed, TrajectoryAborted),
    *(EvaluationRequested, EvaluationFinished, StepRequested, StepCollected, StepTrained, WeightsLoaded),
)


class TraceSpan(NamedTuple):
    """A span of a track. Times are in seconds since the run's start."""

    track: str  # a process, or TRAJECTORIES, STEPS, LEARNER
    start_s: float
    end_s: float
    name: str
    trajectory: int | None = None


class _LiveTrajectory(msgspec.Struct):
    """A trajectory that has not ended."""

    started_s: float
    problem: str
    last_event_s: float
    phase: str = ""  # phase before the last event
    phase_started_s: float = 0.0
    engine: str = ""
    granted_s: float = 0.0
    turn: int = 0


def build_spans(folder: RunFolder) -> list[TraceSpan]:
    """Build all spans of a run. Raises UnusableInput if there is no log."""
    start_time = read_start_time(folder)
    builder = _SpanBuilder()
    for logged in merge_events(folder, EventFilter(kinds=tuple(kind.__name__ for kind in _KINDS))):
        builder.add_event(logged, logged.event.time - start_time)
    builder.close()
    return builder.spans


def find_step(spans: list[TraceSpan], step: int) -> TraceSpan:
    """Return the span of the step. Raises UnusableInput if there is no such step."""
    span = next((each for each in spans if each.track == STEPS and each.name == f"step {step}"), None)
    if span is None:
        raise UnusableInput(f"--step {step}: the logs have no completed step {step}")
    return span


def select_step(spans: list[TraceSpan], step: int) -> list[TraceSpan]:
    """Return the spans that overlap the step's time. Raises UnusableInput if there is no such step."""
    span = find_step(spans, step)
    return [each for each in spans if each.start_s < span.end_s and each.end_s > span.start_s]


class _SpanBuilder:
    def __init__(self) -> None:
        self.spans: list[TraceSpan] = []
        self._live: dict[int, _LiveTrajectory] = {}
        self._requested_s: dict[str, float] = {}  # request times of steps and evaluations, by name
        self._collected_s: dict[int, float] = {}
        self._trained_s = 0.0
        self._now_s = 0.0

    def add_event(self, logged: MergedEvent, at_s: float) -> None:
        self._now_s = at_s
        message, trajectory = logged.envelope.message, logged.event.trajectory
        if isinstance(message, StartGroup):
            for number in range(message.first_trajectory_id, message.first_trajectory_id + message.size):
                if number in self._live:  # the run's next launch restarts an interrupted group
                    self._end_trajectory(number, "abandoned", at_s=self._live[number].last_event_s)
                self._live[number] = _LiveTrajectory(at_s, message.problem, at_s)
        elif trajectory is None:
            if logged.event.actor != "recorder":  # the recorder receives copies
                self.spans.extend(self._build_step_spans(message, at_s))
        elif trajectory in self._live:  # otherwise the event came after the trajectory's end
            self._add_trajectory_event(trajectory, self._live[trajectory], message, at_s)

    def close(self) -> None:
        """End all live trajectories at the end of the log."""
        for trajectory in list(self._live):
            self._end_trajectory(trajectory, "unfinished", self._now_s)

    # ---------------------------------------------------------------- trajectories

    def _add_trajectory_event(self, trajectory: int, live: _LiveTrajectory, message: AnyMessage, at_s: float) -> None:
        match message:
            case LeaseGranted():
                self._extend_phase(trajectory, live, "leasing", at_s)
                live.engine, live.granted_s = message.engine, at_s
            case LeaseDeferred():
                self._extend_phase(trajectory, live, "leasing", at_s)
            case TurnGenerated() | TurnFailed():
                live.turn = message.turn
                self._extend_phase(trajectory, live, f"generating turn {message.turn}", at_s)
                name = f"trajectory {trajectory}, turn {message.turn}"
                self.spans.append(TraceSpan(live.engine, live.granted_s, at_s, name, trajectory))
            case CodeFinished():
                self._extend_phase(trajectory, live, f"calling in turn {live.turn}", at_s)
                self._add_work_span(message, f"call {message.call}", at_s)
            case EnvironmentReturned():
                self._extend_phase(trajectory, live, _name_call_phase(message.call, live.turn), at_s)
                label = "opening" if message.call == OPENING_CALL else f"call {message.call}"
                self._add_work_span(message, label, at_s)
            case CallFailed():
                self._extend_phase(trajectory, live, _name_call_phase(message.call, live.turn), at_s)
            case AnswerGraded():
                self._extend_phase(trajectory, live, "grading", at_s)
                self._add_work_span(message, "grading", at_s)
            case TrajectoryFinished():
                self._end_trajectory(trajectory, f"{message.ending}, reward {message.reward:g}", live.last_event_s)
            case TrajectoryFailed() | TrajectoryAborted():
                self._end_trajectory(trajectory, message.cause, at_s)
            case _:
                pass

    def _extend_phase(self, trajectory: int, live: _LiveTrajectory, phase: str, at_s: float) -> None:
        if phase != live.phase:
            self._close_phase(trajectory, live)
            live.phase, live.phase_started_s = phase, live.last_event_s
        live.last_event_s = at_s

    def _close_phase(self, trajectory: int, live: _LiveTrajectory) -> None:
        if live.phase:
            self.spans.append(TraceSpan(TRAJECTORIES, live.phase_started_s, live.last_event_s, live.phase, trajectory))

    def _end_trajectory(self, trajectory: int, outcome: str, at_s: float) -> None:
        live = self._live.pop(trajectory)
        self._close_phase(trajectory, live)
        name = f"trajectory {trajectory} on {live.problem}: {outcome}"
        self.spans.append(TraceSpan(TRAJECTORIES, live.started_s, max(at_s, live.last_event_s), name, trajectory))

    def _add_work_span(
        self, message: CodeFinished | EnvironmentReturned | AnswerGraded, label: str, at_s: float
    ) -> None:
        name = f"trajectory {message.trajectory_id}, {label}"
        self.spans.append(
            TraceSpan(message.executor, max(0.0, at_s - message.duration_s), at_s, name, message.trajectory_id)
        )

    # ---------------------------------------------------------------- steps

    def _build_step_spans(self, message: AnyMessage, at_s: float) -> Iterator[TraceSpan]:
        match message:
            case StepRequested():
                self._requested_s[f"step {message.step}"] = at_s
            case EvaluationRequested():
                self._requested_s[name_evaluation(message.label, message.version)] = at_s
            case EvaluationFinished():
                yield from self._finish_step_span(name_evaluation(message.label, message.version), at_s)
            case StepCollected():
                self._collected_s[message.step] = at_s
            case StepTrained(step=0):
                yield TraceSpan(LEARNER, max(0.0, at_s - message.metrics.get("sft_s", 0.0)), at_s, "cold start")
                self._trained_s = at_s
            case StepTrained():
                begin = max(self._trained_s, self._collected_s.get(message.step, at_s))
                yield TraceSpan(LEARNER, begin, at_s, f"step {message.step}")
                self._trained_s = at_s
            case WeightsLoaded():
                # The first engine to load the weights ends the step.
                yield from self._finish_step_span(f"step {message.version}", at_s)
            case _:
                pass

    def _finish_step_span(self, name: str, at_s: float) -> Iterator[TraceSpan]:
        if name in self._requested_s:
            yield TraceSpan(STEPS, self._requested_s.pop(name), at_s, name)


def _name_call_phase(call: int, turn: int) -> str:
    return {GRADING_CALL: "grading", OPENING_CALL: "opening"}.get(call, f"calling in turn {turn}")
