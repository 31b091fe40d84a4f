"""Observes deciders: writes log lines of the head and of the rollout processes."""

from collections.abc import Callable, Sequence
from typing import Any

from asterism.bus.addresses import BUFFER
from asterism.bus.messages import (
    AnyMessage,
    EvaluationRequested,
    MetricsRecorded,
    StartGroup,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    name_evaluation,
)
from asterism.policies.decider import Send
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import PHASES, Trajectory

WriteLine = Callable[..., object]  # called with (event, **fields)

_PARTS = ("step_s", "rollout_s", "train_s", "weights_s")


class StepObserver:
    """Writes start and end of steps, evaluations and groups (asterism.actors.runtime.decider_loop.Observer)."""

    def __init__(self, write_line: WriteLine) -> None:
        # Names of the latest request for each purpose: "step 3", "evaluation start_greedy".
        self._names = {"train": "", "evaluate": ""}
        self.quiet = False
        self._write_line = write_line

    def _write_unless_quiet(self, event: str, **fields: Any) -> None:
        if not self.quiet:
            self._write_line(event, **fields)

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        for effect in effects:
            match effect.message:
                case StepRequested(step=step, version=version) if effect.to == BUFFER:
                    self._names["train"] = f"step {step}"
                    self._write_unless_quiet("step.requested", name=f"step {step}", version=version)
                case EvaluationRequested(label=label, version=version) if effect.to == BUFFER:
                    self._names["evaluate"] = name = name_evaluation(label, version)
                    self._write_unless_quiet("step.requested", name=name, version=version)
                case StartGroup(group_id=group_id, size=size, purpose=purpose, problem=problem, task=task):
                    name, fields = self._names[purpose], {"purpose": purpose, "task": task, "problem": problem}
                    self._write_unless_quiet("group.started", name=name, group_id=group_id, size=size, **fields)
                case MetricsRecorded(kind="step", step=step, values=values):
                    parts = {part: values[part] for part in _PARTS if part in values}
                    self._write_unless_quiet("step.ended", name=f"step {step}", **parts)
                case MetricsRecorded(kind="evaluation", step=version, label=label):
                    self._write_unless_quiet("step.ended", name=name_evaluation(label, version))
                case _:
                    pass


class TrajectoryObserver:
    """Writes the end of each trajectory of a rollout process, and every 0.1 s the number in each phase."""

    def __init__(self, write_line: WriteLine, rollout: Rollout) -> None:
        self.quiet = False
        self._write_line = write_line
        self._rollout = rollout
        self._last_counts: dict[str, Any] = {}

    def write_counts(self) -> None:
        """Write the counts by phase unless they are unchanged."""
        counts: dict[str, Any] = {phase: self._rollout.num_by_phase[phase] for phase in PHASES}
        counts["engines"] = {engine: count for engine, count in self._rollout.num_generating.items() if count}
        if counts != self._last_counts and not self.quiet:
            self._write_line("trajectories.counted", **counts)
        self._last_counts = counts

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        if self.quiet:
            return
        for effect in effects:
            match effect.message:
                case TrajectoryFinished() | TrajectoryFailed() | TrajectoryAborted() as end:
                    fields = {**_describe_trajectory(self._rollout.ended[end.trajectory_id]), **_describe_end(end)}
                    self._write_line("trajectory.ended", **fields)
                case _:
                    pass


def _describe_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    record, waits = trajectory.record, trajectory.waits
    return {
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group.group_id,
        "purpose": trajectory.group.purpose,
        "turns": trajectory.turn,
        "calls": trajectory.calls + len(trajectory.results),  # includes the calls in flight
        "calls_failed": trajectory.calls_failed,
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.num_tokens,
        "generated_tokens": record.loss_mask.count(1),
        "leases": trajectory.lease,
        "migrations": trajectory.migrations,
        "lease_wait_s": waits.leasing,
        "generation_s": waits.generating,
        "tools_s": waits.calling,
        "grading_s": waits.grading,
    }


def _describe_end(end: TrajectoryFinished | TrajectoryFailed | TrajectoryAborted) -> dict[str, Any]:
    match end:
        case TrajectoryFinished(ending=ending, reward=reward, components=components):
            return {"ending": ending, "cause": "", "reward": reward, "components": components}
        case TrajectoryFailed(cause=cause):
            return {"ending": "failed", "cause": cause, "reward": None}
        case TrajectoryAborted(cause=cause):
            return {"ending": "aborted", "cause": cause, "reward": None}
