"""Counting: what a step's trajectories were, and where its time went.

A step's time begins with its request, or with the end of the step before where rollouts run ahead of the learner; so the
times of all steps add up in both cases, and `rollout_s` is what the learner waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.messages import (
    AnyMessage,
    EvaluationFinished,
    LengthCounts,
    LengthsMeasured,
    MetricsRecorded,
    Progress,
    ProtocolError,
    RunStarted,
    StalenessCounts,
    StepCollected,
    StepCounts,
    StepRequested,
    StepTrained,
    TrajectoryFinished,
    WeightsHeld,
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
    """When a step reached each border, in seconds."""

    step: int = 0
    requested: float = 0.0
    collected: float = 0.0
    trained: float = 0.0
    counts: StepCounts = StepCounts()
    failures: dict[str, int] = {}
    training: dict[str, float] = {}
    staleness: StalenessCounts | None = None


class RecorderState(msgspec.Struct):
    step: int = 0  # the last that ended
    ended: float = 0.0  # when
    steps: list[StepTimes] = []  # those that were requested and have not ended


class Recorder:
    """A decider (policies.decider.Decider): one line of metrics a step and an evaluation, and the display's numbers."""

    def __init__(self, steps: int, metrics: str = "head/metrics", display: str = "launcher") -> None:
        self._steps = steps
        self._metrics = metrics
        self._display = display
        self.state = RecorderState()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted(step=step):
                self.state = RecorderState(step=step, ended=now)
            case StepRequested(step=step):
                self.state.steps.append(StepTimes(step=step, requested=now))
            case StepCollected():
                times = self._times(event.step)
                times.collected = now
                times.counts, times.failures, times.staleness = event.counts, event.failures, event.staleness
            case StepTrained():
                if event.step > self.state.step:  # not the cold start, nor a checkpoint that a run goes on from
                    times = self._times(event.step)
                    if times.trained:
                        raise ProtocolError(f"step {event.step} was trained before")
                    times.trained, times.training = now, event.metrics
            case WeightsHeld(version=version):
                return self._weights_held(version, now)
            case EvaluationFinished():
                return self._evaluated(event)
            case LengthsMeasured():
                return [Send(self._metrics, MetricsRecorded("lengths", event.step, "", length_metrics(event)))]
            case _:
                raise ProtocolError(f"the recorder has no use for {type(event).__name__}")
        return []

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state

    def _times(self, step: int) -> StepTimes:
        for times in self.state.steps:
            if times.step == step:
                return times
        raise ProtocolError(f"step {step} was not requested")

    def _weights_held(self, version: int, now: float) -> list[Send]:
        """The step of that version has ended, and with it what an engine that came late was waited for."""
        ended = [times for times in self.state.steps if times.step <= version]
        return [send for times in ended for send in self._step_ended(times, now)]

    def _step_ended(self, times: StepTimes, now: float) -> list[Send]:
        values = step_metrics(without_overlap(times, self.state.ended), now)
        step = times.step
        self.state.steps.remove(times)
        self.state.step, self.state.ended = step, now
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
            Send(self._metrics, MetricsRecorded("evaluation", self.state.step, event.label, values)),
            Send(self._display, Progress(f"evaluation {event.label}", self.state.step, self._steps, values)),
        ]


def without_overlap(times: StepTimes, begin: float) -> StepTimes:
    """`times` without what lies before `begin`, the end of the step before."""
    requested = max(times.requested, begin)
    collected = max(times.collected, requested)
    return replace(times, requested=requested, collected=collected, trained=max(times.trained, collected))


def step_metrics(times: StepTimes, loaded: float) -> dict[str, float]:
    """One step in numbers. The three phases add up to `step_s`; waits are means over trajectories, in seconds."""
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
        "tokens_per_s": ratio(counts.generated_tokens, rollout_s if times.staleness is None else step_s),
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
        **staleness_metrics(times.staleness),
    }


def staleness_metrics(counts: StalenessCounts | None) -> dict[str, float]:
    """Means and maximum in versions, over the tokens that are trained on."""
    if counts is None:
        return {}
    return {
        "staleness_mean": ratio(counts.versions_behind, counts.tokens),
        "staleness_max": float(counts.most_behind),
        "stale_tokens_masked": float(counts.tokens_masked),
        "stale_trajectories_dropped": float(counts.trajectories_dropped),
    }


def lengths_with(counts: LengthCounts, trajectory: TrajectoryFinished) -> LengthCounts:
    """`counts` with one more finished trajectory."""
    return LengthCounts(
        trajectories=counts.trajectories + 1,
        response_tokens=counts.response_tokens + len(trajectory.loss_mask) - trajectory.prompt_tokens,
        overlong=counts.overlong + (trajectory.ending == "length"),
    )


def length_metrics(measured: LengthsMeasured) -> dict[str, float]:
    """What ending a step with its first complete groups does to the lengths. `length_bias` is 1 where it does nothing;
    an upper bound where trajectories were aborted, since they count with the tokens that they had."""
    taken, started = measured.taken, measured.started
    taken_tokens = ratio(taken.response_tokens, taken.trajectories)
    started_tokens = ratio(started.response_tokens, started.trajectories)
    return {
        "length_bias": ratio(taken_tokens, started_tokens),
        "taken_response_tokens": taken_tokens,
        "started_response_tokens": started_tokens,
        "taken_overlong_share": ratio(taken.overlong, taken.trajectories),
        "started_overlong_share": ratio(started.overlong, started.trajectories),
        "taken_trajectories": float(taken.trajectories),
        "started_trajectories": float(started.trajectories),
        "aborted_trajectories": float(measured.aborted),
        "late_trajectories": float(measured.late),
    }
