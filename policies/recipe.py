"""The order of a run: weights, first evaluation, RL steps, last evaluation.

    weights of step v on every engine --> evaluate (v = 0, or the last) --> StepRequested(v + 1 ... v + 1 + max_staleness)

With max_staleness = 0 a step begins when every engine holds the weights of the step before: the algorithm is
synchronous. With k > 0 steps up to k further ones are collected while the learner trains, and engines load weights while
turns are under way: what is generated for a step is at most k versions older than the policy that the step updates.
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


class Loading(msgspec.Struct):
    version: int
    engines: list[str] = []  # that hold it


class RecipeState(msgspec.Struct):
    version: int = -1  # newest that was published
    loading: list[Loading] = []  # what not every engine holds yet, oldest first
    held: int = -1  # newest that every engine holds
    requested: int = -1  # last step that was asked for
    evaluations: list[str] = []  # labels that are still to come before the next step


class Recipe:
    """A decider (policies.decider.Decider)."""

    def __init__(
        self, steps: int, questions: int, temperature: float, engines: tuple[str, ...], max_staleness: int = 0
    ) -> None:
        self._steps = steps
        self._questions = questions
        self._temperature = temperature
        self._engines = engines
        self._max_staleness = max_staleness
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
        state = self.state
        if event.version <= state.version:
            raise ProtocolError(f"version {event.version} after version {state.version}")
        if state.version < 0:  # the learner's checkpoint: steps follow it
            state.requested = event.version
        state.version = event.version
        state.loading.append(Loading(event.version))
        return [Send(engine, event) for engine in self._engines]

    def _load(self, event: WeightsLoaded) -> list[Send]:
        state = self.state
        loading = next((each for each in state.loading if each.version == event.version), None)
        if loading is None or event.engine in loading.engines:
            raise ProtocolError(f"{event.engine} loaded version {event.version}, which nobody waits for")
        loading.engines.append(event.engine)
        before = state.held
        while state.loading and len(state.loading[0].engines) == len(self._engines):
            state.held = state.loading.pop(0).version
        recorded = Send(self._recorder, event)
        if state.held == before:
            return [recorded]
        state.evaluations = self._due(state.held)
        return [recorded, *self._next()]

    def _due(self, step: int) -> list[str]:
        if not self._questions:
            return []
        labels = START_LABELS if step == 0 else ()
        return [*labels, *(END_LABELS if step == self._steps else ())]

    def _evaluated(self, label: str) -> list[Send]:
        if not self.state.evaluations or self.state.evaluations[0] != label:
            raise ProtocolError(f"evaluation {label} was not asked for")
        del self.state.evaluations[0]
        return self._next()

    def _next(self) -> list[Send]:
        state = self.state
        if state.evaluations:
            label = state.evaluations[0]
            temperature = 0.0 if label.endswith("greedy") else self._temperature
            return [Send("head/buffer", EvaluationRequested(label, temperature, self._questions, state.held))]
        if state.held >= self._steps:
            return [Send("launcher", RunFinished(state.held))]
        effects: list[Send] = []
        while state.requested < min(state.held + 1 + self._max_staleness, self._steps):
            state.requested += 1
            request = StepRequested(state.requested, state.held)
            effects += [Send(self._recorder, request), Send("head/buffer", request)]
        return effects
