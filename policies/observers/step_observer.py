"""Log lines of the head: start and end of steps, evaluations and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bus.addresses import BUFFER
from bus.messages import AnyMessage, EvaluationRequested, MetricsRecorded, StartGroup, StepRequested
from policies.decider import Send
from policies.observers.trajectory_observer import WriteLine

_PARTS = ("step_s", "rollout_s", "train_s", "weights_s")


class StepObserver:
    """Observes the head (actors.runtime.decider_loop.Observer)."""

    def __init__(self, write_line: WriteLine, buffer: str = BUFFER) -> None:
        self._buffer = buffer
        self._name = ""  # of the latest request: "step 3", "evaluation start_greedy"
        self.quiet = False
        self._write_line = write_line

    def _write_unless_quiet(self, event: str, **fields: Any) -> None:
        if not self.quiet:
            self._write_line(event, **fields)

    def on_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        for effect in effects:
            match effect.message:
                case StepRequested(step=step, version=version) if effect.to == self._buffer:
                    self._name = f"step {step}"
                    self._write_unless_quiet("step.requested", name=self._name, version=version)
                case EvaluationRequested(label=label, version=version) if effect.to == self._buffer:
                    self._name = f"evaluation {label}"
                    self._write_unless_quiet("step.requested", name=self._name, version=version)
                case StartGroup(group_id=group_id, size=size, purpose=purpose, problem=problem):
                    self._write_unless_quiet(
                        "group.started", name=self._name, group_id=group_id, size=size, purpose=purpose, problem=problem
                    )
                case MetricsRecorded(kind="step", step=step, values=values):
                    parts = {part: values[part] for part in _PARTS if part in values}
                    self._write_unless_quiet("step.ended", name=f"step {step}", **parts)
                case MetricsRecorded(kind="evaluation", label=label):
                    self._write_unless_quiet("step.ended", name=f"evaluation {label}")
                case _:
                    pass
