"""What engines take for a decode step, for a cached token that it reads, and for a token that is computed anew.

Learned by least squares from what engines report: between two reports one is busy for

    seconds = step * decode steps + read * (steps * cached tokens of those that run) + prefill * prefilled tokens

Older reports count less. Until enough is known, all are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bus.messages import EngineLoadReported

_KEPT = 0.9999  # of a report's weight, with each newer one
_SCALE = np.array([1.0, 1e5, 1e2, 1.0])  # of the columns, so that none is lost beside another
_RIDGE = 1e-6  # of the columns' squares: what has not varied yet gets a cost of about 0
_SOLVE_AFTER = 16  # reports


class Costs(NamedTuple):
    """Seconds."""

    step: float
    read: float
    prefill: float


class StepCosts:
    def __init__(self) -> None:
        self._squares = np.zeros((4, 4))
        self._last: dict[str, EngineLoadReported] = {}  # by engine
        self._num_reports = 0
        self.costs = Costs(0.0, 0.0, 0.0)

    def note(self, report: EngineLoadReported) -> None:
        last = self._last.get(report.engine)
        self._last[report.engine] = report
        if last is None:
            return
        steps = report.decode_steps - last.decode_steps
        cached = (report.used_tokens - report.cached_tokens + last.used_tokens - last.cached_tokens) / 2
        row = (steps, steps * cached, report.prefilled_tokens - last.prefilled_tokens, report.busy_s - last.busy_s)
        scaled = np.array(row) / _SCALE
        self._squares = self._squares * _KEPT + np.outer(scaled, scaled)
        self._num_reports += 1
        if self._num_reports % _SOLVE_AFTER == 0:
            self.costs = self._solve()

    def forget(self, engine: str) -> None:
        """It has left; if it comes back it counts from 0."""
        self._last.pop(engine, None)

    def _solve(self) -> Costs:
        squares, products = self._squares[:3, :3], self._squares[:3, 3]
        ridge = _RIDGE * max(float(np.trace(squares)), 1e-12) * np.eye(3)
        step, read, prefill = (np.linalg.solve(squares + ridge, products) / _SCALE[:3]).tolist()
        return Costs(max(step, 0.0), max(read, 0.0), max(prefill, 0.0))
