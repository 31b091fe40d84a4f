"""What the head's decisions leave in its structured log: when steps, evaluations and groups began and ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.utilization.trajectory_observer import Say
from bus.messages import AnyMessage, EvaluationRequested, MetricsRecorded, StartGroup, StepRequested
from policies.decider import Send

_PARTS = ("step_s", "rollout_s", "train_s", "weights_s")


class StepObserver:
    """An observer (actors.decider_loop.Observer) of the head. It counts what the recipe asks the buffer for."""

    def __init__(self, say: Say, buffer: str = "head/buffer") -> None:
        self._buffer = buffer
        self._name = ""  # of what was asked for last: "step 3", "evaluation start_greedy"
        self.quiet = False
        self._aloud = say

    def _say(self, event: str, **fields: Any) -> None:
        if not self.quiet:
            self._aloud(event, **fields)

    def saw(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        for effect in effects:
            match effect.message:
                case StepRequested(step=step, version=version) if effect.to == self._buffer:
                    self._name = f"step {step}"
                    self._say("step.requested", name=self._name, version=version)
                case EvaluationRequested(label=label, version=version) if effect.to == self._buffer:
                    self._name = f"evaluation {label}"
                    self._say("step.requested", name=self._name, version=version)
                case StartGroup(group_id=group_id, size=size, purpose=purpose, problem=problem):
                    self._say(
                        "group.started", name=self._name, group_id=group_id, size=size, purpose=purpose, problem=problem
                    )
                case MetricsRecorded(kind="step", step=step, values=values):
                    parts = {part: values[part] for part in _PARTS if part in values}
                    self._say("step.ended", name=f"step {step}", **parts)
                case MetricsRecorded(kind="evaluation", label=label):
                    self._say("step.ended", name=f"evaluation {label}")
                case _:
                    pass
