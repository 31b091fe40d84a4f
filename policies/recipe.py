"""The order of a run: weights, first evaluation, RL steps, last evaluation.

    weights of step k on every engine --> evaluate (k = 0, or the last) --> StepRequested(k + 1) --> ...

A step begins when every engine holds the weights of the step before: the algorithm is synchronous.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bus.messages import (
    AnyMessage,
    EvaluationFinished,
    EvaluationRequested,
    ProtocolError,
    RunFinished,
    RunStarted,
    StepCollected,
    StepRequested,
    StepTrained,
    WeightsLoaded,
    WeightsPublished,
)
from policies.decider import Send

START_LABELS = ("start_sampled", "start_greedy")
END_LABELS = ("end_sampled", "end_greedy")


class RecipeState(msgspec.Struct):
    version: int = -1  # of the weights that the engines hold or are loading
    loaded: list[str] = []
    evaluations: list[str] = []  # labels that are still to come before the next step


class Recipe:
    """A decider (policies.decider.Decider)."""

    def __init__(self, steps: int, questions: int, temperature: float, engines: tuple[str, ...]) -> None:
        self._steps = steps
        self._questions = questions
        self._temperature = temperature
        self._engines = engines
        self._recorder = "head/recorder"
        self.state = RecipeState()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():
                self.state = RecipeState()
                return []
            case WeightsPublished():
                return self._publish(event)
            case WeightsLoaded():
                return self._load(event)
            case EvaluationFinished(label=label):
                return self._evaluated(label)
            case StepCollected():
                return []
            case StepTrained():
                return [Send(self._recorder, event)]
            case _:
                raise ProtocolError(f"the recipe has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state

    def _publish(self, event: WeightsPublished) -> list[Send]:
        if event.version <= self.state.version:
            raise ProtocolError(f"version {event.version} after version {self.state.version}")
        self.state = RecipeState(version=event.version, evaluations=self._due(event.version))
        return [Send(engine, event) for engine in self._engines]

    def _due(self, step: int) -> list[str]:
        if not self._questions:
            return []
        labels = START_LABELS if step == 0 else ()
        return [*labels, *(END_LABELS if step == self._steps else ())]

    def _load(self, event: WeightsLoaded) -> list[Send]:
        if event.version != self.state.version or event.engine in self.state.loaded:
            raise ProtocolError(f"{event.engine} loaded version {event.version}, which nobody waits for")
        self.state.loaded.append(event.engine)
        complete = len(self.state.loaded) == len(self._engines)
        return [Send(self._recorder, event), *(self._next() if complete else [])]

    def _evaluated(self, label: str) -> list[Send]:
        if not self.state.evaluations or self.state.evaluations[0] != label:
            raise ProtocolError(f"evaluation {label} was not asked for")
        del self.state.evaluations[0]
        return self._next()

    def _next(self) -> list[Send]:
        version = self.state.version
        if self.state.evaluations:
            label = self.state.evaluations[0]
            temperature = 0.0 if label.endswith("greedy") else self._temperature
            return [Send("head/buffer", EvaluationRequested(label, temperature, self._questions, version))]
        if version >= self._steps:
            return [Send("launcher", RunFinished(version))]
        request = StepRequested(version + 1, version)
        return [Send(self._recorder, request), Send("head/buffer", request)]
