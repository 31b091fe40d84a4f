"""Who should go to another engine, so that all engines end together: the step ends with the last of them.

When an engine will have ended what it has is expected from what its trajectories still need, and from what engines were
measured to take (policies.step_costs):

    end = step * (tokens to go of its longest) + read * (cached tokens that all their steps to come read)
"""

from __future__ import annotations

from typing import NamedTuple

from policies.forecast import Forecast, reads
from policies.ledger import Engine
from policies.step_costs import Costs, StepCosts

_SOONER = 0.7  # of the time until its engine ends must the other one end in, with it
_WORTH = 0.75  # times what computing its cache anew costs must it take off its engine


class _Load(NamedTuple):
    """Of one engine when it last reported, and as it has moved since. Tokens."""

    longest: float  # to go
    reads: float

    def end_s(self, costs: Costs) -> float:
        return costs.step * self.longest + costs.read * self.reads


class Balance:
    def __init__(self) -> None:
        self._costs = StepCosts()
        self._loads: dict[str, _Load] = {}  # by engine
        self._ends: dict[str, float] = {}  # seconds from now

    def measured(self, engine: Engine, forecast: Forecast) -> None:
        if engine.report is not None:
            self._costs.note(engine.report)
        self._note(engine.name, _Load(forecast.longest(), forecast.reads))

    def left(self, engine: Engine) -> None:
        self._costs.forget(engine.name)
        self._loads.pop(engine.name, None)
        self._ends.pop(engine.name, None)

    def better(self, name: str, tokens: int, to_go: float) -> str | None:
        """The engine on which one of `name`'s trajectories, with so many tokens, lets the later of the two end sooner."""
        mine = self._ends.get(name, 0.0)
        if mine <= 0.0 or len(self._ends) < 2:
            return None
        best = min(self._ends, key=self._ends.__getitem__)
        if self._ends[best] > _SOONER * mine:
            return None
        costs = self._costs.costs
        again_s = costs.prefill * tokens + 2 * costs.step
        if costs.read * reads(tokens, to_go) < _WORTH * again_s:
            return None
        theirs = self._joined(best, tokens, to_go).end_s(costs) + again_s
        return best if theirs < _SOONER * mine else None

    def moved(self, name: str, to: str, tokens: int, to_go: float) -> None:
        self._note(to, self._joined(to, tokens, to_go))
        load = self._loads[name]
        self._note(name, load._replace(reads=load.reads - reads(tokens, to_go)))

    def _joined(self, name: str, tokens: int, to_go: float) -> _Load:
        load = self._loads[name]
        return _Load(max(load.longest, to_go), load.reads + reads(tokens, to_go))

    def _note(self, name: str, load: _Load) -> None:
        self._loads[name] = load
        self._ends[name] = load.end_s(self._costs.costs)
