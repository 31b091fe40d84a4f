"""Counting: what a step's trajectories were, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.messages import (
    AnyMessage,
    EvaluationFinished,
    MetricsRecorded,
    Progress,
    ProtocolError,
    RunStarted,
    StepCollected,
    StepCounts,
    StepRequested,
    StepTrained,
    TrajectoryFinished,
    WeightsLoaded,
)
from policies.decider import Send


def counted(counts: StepCounts, trajectory: TrajectoryFinished) -> StepCounts:
    """`counts` with one more finished trajectory."""
    positive = trajectory.reward > 0
    return replace(
        counts,
        trajectories=counts.trajectories + 1,
        correct=counts.correct + positive,
        overlong=counts.overlong + (trajectory.ending == "length"),
        calls=counts.calls + trajectory.calls,
        calls_failed=counts.calls_failed + trajectory.calls_failed,
        positive_calls=counts.positive_calls + (trajectory.calls if positive else 0),
        positive_calls_failed=counts.positive_calls_failed + (trajectory.calls_failed if positive else 0),
        generated_tokens=counts.generated_tokens + sum(trajectory.loss_mask),
        response_tokens=counts.response_tokens + len(trajectory.loss_mask) - trajectory.prompt_tokens,
        lease_wait_s=counts.lease_wait_s + trajectory.lease_wait_s,
        generation_s=counts.generation_s + trajectory.generation_s,
        tools_s=counts.tools_s + trajectory.tools_s,
        grading_s=counts.grading_s + trajectory.grading_s,
    )


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class StepTimes(msgspec.Struct):
    """When the present step reached each border, in seconds."""

    step: int = 0
    requested: float = 0.0
    collected: float = 0.0
    trained: float = 0.0
    counts: StepCounts = StepCounts()
    failures: dict[str, int] = {}
    training: dict[str, float] = {}


class Recorder:
    """A decider (policies.decider.Decider): one line of metrics a step and an evaluation, and the display's numbers."""

    def __init__(self, steps: int, num_engines: int, metrics: str = "head/metrics", display: str = "launcher") -> None:
        self._steps = steps
        self._num_engines = num_engines
        self._metrics = metrics
        self._display = display
        self.times = StepTimes()
        self._loaded = 0

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted(step=step):
                self.times, self._loaded = StepTimes(step=step, requested=now), 0
            case StepRequested(step=step):
                self.times, self._loaded = StepTimes(step=step, requested=now), 0
            case StepCollected():
                self.times.collected = now
                self.times.counts, self.times.failures = event.counts, event.failures
            case StepTrained():
                self.times.trained, self.times.training = now, event.metrics
            case WeightsLoaded():
                self._loaded += 1
                if self._loaded == self._num_engines and self.times.collected:
                    return self._step_ended(now)
            case EvaluationFinished():
                return self._evaluated(event)
            case _:
                raise ProtocolError(f"the recorder has no use for {type(event).__name__}")
        return []

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.times

    def _step_ended(self, now: float) -> list[Send]:
        times = self.times
        values = step_metrics(times, now)
        step = times.step
        self.times = StepTimes(step=step, requested=now)
        return [
            Send(self._metrics, MetricsRecorded("step", step, "", values)),
            Send(self._display, Progress("rl", step, self._steps, values)),
        ]

    def _evaluated(self, event: EvaluationFinished) -> list[Send]:
        answered = event.questions - event.failed
        values = {
            "accuracy": ratio(event.correct, answered),
            "questions": float(event.questions),
            "failed": float(event.failed),
            "response_tokens": ratio(event.response_tokens, answered),
        }
        return [
            Send(self._metrics, MetricsRecorded("evaluation", self.times.step, event.label, values)),
            Send(self._display, Progress(f"evaluation {event.label}", self.times.step, self._steps, values)),
        ]


def step_metrics(times: StepTimes, loaded: float) -> dict[str, float]:
    """One step in numbers. The four phases add up to `step_s`; waits are means over trajectories, in seconds."""
    counts = times.counts
    rollout_s, train_s = times.collected - times.requested, times.trained - times.collected
    step_s = loaded - times.requested
    failures = {f"failed: {cause}": float(count) for cause, count in times.failures.items()}
    return {
        "reward": ratio(counts.correct, counts.trajectories),
        "errors_in_positives": ratio(counts.positive_calls_failed, counts.positive_calls),
        "tool_errors": ratio(counts.calls_failed, counts.calls),
        "calls_per_rollout": ratio(counts.calls, counts.trajectories),
        "response_tokens": ratio(counts.response_tokens, counts.trajectories),
        "overlong_share": ratio(counts.overlong, counts.trajectories),
        "groups": float(counts.groups),
        "groups_rejected": float(counts.groups_rejected),
        "groups_lost": float(counts.groups_lost),
        "trajectories": float(counts.trajectories),
        "trajectories_failed": float(counts.trajectories_failed),
        "generated_tokens": float(counts.generated_tokens),
        "tokens_per_s": ratio(counts.generated_tokens, rollout_s),
        "step_s": step_s,
        "rollout_s": rollout_s,
        "train_s": train_s,
        "weights_s": loaded - times.trained,
        "wait_lease_s": ratio(counts.lease_wait_s, counts.trajectories),
        "wait_generation_s": ratio(counts.generation_s, counts.trajectories),
        "wait_tools_s": ratio(counts.tools_s, counts.trajectories),
        "wait_grading_s": ratio(counts.grading_s, counts.trajectories),
        **{name: value for name, value in times.training.items() if name != "train_s"},
        **failures,
    }
