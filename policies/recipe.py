"""The order of a run: weights, first evaluation, RL steps, last evaluation.

    weights of step v on every engine --> evaluate (v = 0, or the last) --> StepRequested(v + 1 ... v + 1 + max_staleness)

With max_staleness = 0 a step begins when every engine holds the weights of the step before: the algorithm is
synchronous. With k > 0 steps up to k further ones are collected while the learner trains, and engines load weights while
turns are under way: what is generated for a step is at most k versions older than the policy that the step updates.

Engines come and go. One that has left is not waited for; one that joins gets the newest weights, and is waited for from
then on. A learner that begins again from a checkpoint says again what it had said: that counts once.

Where learner and engines share GPUs the learner asks for the engines' memory before it computes. Each engine ends the
turns that it is at and gives its memory back; so does one that joins meanwhile. When all have, the learner computes, and
the weights that it publishes end the loan:

    MemoryWanted --> RestRequested to every engine --> EngineRested from every engine --> MemoryLent --> WeightsPublished
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from bus.messages import (
    AnyMessage,
    EngineJoined,
    EngineLeft,
    EngineRested,
    EvaluationFinished,
    EvaluationRequested,
    MemoryLent,
    MemoryWanted,
    ProtocolError,
    RestRequested,
    RunFinished,
    RunStarted,
    StepCollected,
    StepRequested,
    StepTrained,
    WeightsHeld,
    WeightsLoaded,
    WeightsPublished,
)
from policies.decider import Send

START_LABELS = ("start_sampled", "start_greedy")
END_LABELS = ("end_sampled", "end_greedy")


class EngineWeights(msgspec.Struct):
    life: int = 1
    told: int = -1  # the newest version that it was told of
    holds: int = -1


class Loan(msgspec.Struct):
    """Of the engines' memory to the learner: the last one."""

    life: int  # of the learner
    version: int  # as of MemoryWanted
    phase: Literal["asked", "lent", "over"] = "asked"
    resting: dict[str, int] = {}  # engines that have given their memory back, and the life of each


class RecipeState(msgspec.Struct):
    engines: dict[str, EngineWeights] = {}  # that are there, or are to come when the run begins
    left: dict[str, int] = {}  # the last life of each that is over
    newest: WeightsPublished | None = None
    trained: int = -1  # last step
    held: int = -1  # newest version that every engine holds
    requested: int = -1  # last step that was asked for
    evaluations: list[str] = []  # labels that are still to come before the next step
    loan: Loan | msgspec.UnsetType = msgspec.UNSET  # where the learner has asked for the engines' memory

    @property
    def version(self) -> int:
        return -1 if self.newest is None else self.newest.version

    @property
    def open_loan(self) -> Loan | None:
        return self.loan if isinstance(self.loan, Loan) and self.loan.phase != "over" else None

    @property
    def unrested(self) -> list[str]:
        """Engines whose memory is still asked for."""
        if (loan := self.open_loan) is None:
            return []
        return [name for name, engine in self.engines.items() if loan.resting.get(name) != engine.life]


class Recipe:
    """A decider (policies.decider.Decider). `engines` are those with which the run begins."""

    def __init__(
        self, steps: int, questions: int, temperature: float, engines: tuple[str, ...], max_staleness: int = 0
    ) -> None:
        self._steps = steps
        self._questions = questions
        self._temperature = temperature
        self._engines = engines
        self._max_staleness = max_staleness
        self._recorder = "head/recorder"
        self._begin()

    def _begin(self) -> None:
        self.state = RecipeState(engines={name: EngineWeights() for name in self._engines})

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():
                self._begin()
                return []
            case EngineJoined():
                return self._join(event)
            case EngineLeft():
                return self._leave(event)
            case WeightsPublished():
                return self._publish(event)
            case WeightsLoaded():
                return self._load(event)
            case MemoryWanted():
                return self._lend(event)
            case EngineRested():
                return self._rested(event)
            case EvaluationFinished(label=label):
                return self._evaluated(label)
            case StepCollected():
                return []
            case StepTrained(step=step):
                if step <= self.state.trained:
                    return []
                self.state.trained = step
                return [Send(self._recorder, event)]
            case _:
                raise ProtocolError(f"the recipe has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        return self.state

    # ---------------------------------------------------------------- engines and their weights

    def _join(self, event: EngineJoined) -> list[Send]:
        known = self.state.engines.get(event.engine)
        if event.life <= self.state.left.get(event.engine, 0) or (known is not None and event.life < known.life):
            raise ProtocolError(f"life {event.life} of {event.engine} was over before")
        is_new = known is None or event.life > known.life
        if is_new:
            self.state.engines[event.engine] = EngineWeights(event.life)
        if (loan := self.state.open_loan) is None:
            return self._tell()
        if not is_new:
            return []  # it was asked before it came
        self.state.engines[event.engine].told = self.state.version  # they come when the loan is over
        return [Send(event.engine, RestRequested(loan.life, loan.version))]

    def _leave(self, event: EngineLeft) -> list[Send]:
        if event.life <= self.state.left.get(event.engine, 0):
            raise ProtocolError(f"life {event.life} of {event.engine} was over before")
        self.state.left[event.engine] = event.life
        known = self.state.engines.get(event.engine)
        if known is not None and known.life <= event.life:
            del self.state.engines[event.engine]
        return [*self._held(), *self._lent()]

    def _publish(self, event: WeightsPublished) -> list[Send]:
        """The same version comes again from a learner that has begun again; who holds it keeps it."""
        state = self.state
        if event.version < state.version:
            raise ProtocolError(f"version {event.version} after version {state.version}")
        if state.newest is None:  # the learner's checkpoint: steps follow it
            state.requested = event.version
        state.newest = event
        if (loan := state.open_loan) is not None:
            if loan.phase == "asked" or event.version < loan.version:
                return []
            loan.phase = "over"
        for engine in state.engines.values():  # one that has rested has none
            engine.told = min(engine.told, engine.holds) if loan is None else -1
        return self._tell()

    def _tell(self) -> list[Send]:
        newest = self.state.newest
        if newest is None:
            return []
        ignorant = [name for name, engine in self.state.engines.items() if engine.told < newest.version]
        for name in ignorant:
            self.state.engines[name].told = newest.version
        return [Send(name, newest) for name in ignorant]

    def _load(self, event: WeightsLoaded) -> list[Send]:
        engine = self.state.engines.get(event.engine)
        if engine is None or engine.life != event.life:
            raise ProtocolError(f"life {event.life} of {event.engine} is not there, and loaded version {event.version}")
        if event.version > engine.told:
            raise ProtocolError(f"{event.engine} loaded version {event.version}, and was told of {engine.told}")
        engine.holds = max(engine.holds, event.version)
        return self._held()

    def _held(self) -> list[Send]:
        """What follows once every engine that is there holds newer weights."""
        state = self.state
        held = min((engine.holds for engine in state.engines.values()), default=state.held)
        if held <= state.held:
            return []
        state.held = held
        state.evaluations = self._due(held)
        return [Send(self._recorder, WeightsHeld(held)), *self._next()]

    # ---------------------------------------------------------------- the engines' memory

    def _lend(self, event: MemoryWanted) -> list[Send]:
        """A learner that has begun again asks again, and whoever rests says so again."""
        last = self.state.loan
        if isinstance(last, Loan) and (event.life, event.version) <= (last.life, last.version):
            raise ProtocolError(
                f"life {event.life} of the learner asked for memory before version {event.version} twice"
            )
        self.state.loan = Loan(event.life, event.version)
        request = RestRequested(event.life, event.version)
        return [*(Send(name, request) for name in self.state.engines), *self._lent()]

    def _rested(self, event: EngineRested) -> list[Send]:
        loan, engine = self.state.open_loan, self.state.engines.get(event.engine)
        asked_for = loan is not None and event.asked == RestRequested(loan.life, loan.version)
        if loan is None or not asked_for or engine is None or engine.life != event.life:
            raise ProtocolError(f"life {event.life} of {event.engine} was not asked to rest")
        loan.resting[event.engine] = event.life
        return self._lent()

    def _lent(self) -> list[Send]:
        loan = self.state.open_loan
        if loan is None or loan.phase == "lent" or self.state.unrested:
            return []
        loan.phase = "lent"
        return [Send("learner", MemoryLent(loan.life, loan.version))]

    # ---------------------------------------------------------------- what comes next

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
            return [Send("head/buffer", RunFinished(state.held))]
        effects: list[Send] = []
        while state.requested < min(state.held + 1 + self._max_staleness, self._steps):
            state.requested += 1
            request = StepRequested(state.requested, state.held)
            effects += [Send(self._recorder, request), Send("head/buffer", request)]
        return effects
