"""Engine costs: seconds per decode step, per cached token that a step reads, and per prefilled token.

A least-squares fit over load reports estimates the costs. The busy time of an engine between two
reports is

    step * decode steps + read * (steps * cached tokens of running trajectories) + prefill *
    prefilled tokens

Older reports weigh less. All costs are 0 until the first solution.
"""

from typing import NamedTuple

import numpy as np

from asterism.bus.messages import EngineLoadReported

_DECAY = 0.9999  # factor by which each newer report reduces a report's weight
_SCALE = np.array([1.0, 1e5, 1e2, 1.0])  # divisors that bring the columns to similar magnitudes
_RIDGE = 1e-6  # ridge term, as a share of the trace: a column without variation gets a cost of about 0
_SOLVE_EVERY = 16  # reports between two solutions


class CostCoefficients(NamedTuple):
    """Seconds per decode step, per cached token that a step reads, and per prefilled token."""

    step: float
    read: float
    prefill: float


class DecodeCostModel:
    def __init__(self) -> None:
        self._squares = np.zeros((4, 4))
        self._last_reports: dict[str, EngineLoadReported] = {}  # by engine
        self._num_reports = 0
        self.costs = CostCoefficients(0.0, 0.0, 0.0)

    def add_report(self, report: EngineLoadReported) -> None:
        last = self._last_reports.get(report.engine)
        self._last_reports[report.engine] = report
        if last is None:
            return
        steps = report.decode_steps - last.decode_steps
        cached = (report.used_tokens - report.cached_tokens + last.used_tokens - last.cached_tokens) / 2
        row = (steps, steps * cached, report.prefilled_tokens - last.prefilled_tokens, report.busy_s - last.busy_s)
        scaled = np.array(row) / _SCALE
        self._squares = self._squares * _DECAY + np.outer(scaled, scaled)
        self._num_reports += 1
        if self._num_reports % _SOLVE_EVERY == 0:
            self.costs = self._solve()

    def remove_engine(self, engine: str) -> None:
        """Forget the last report: the counters of an engine that rejoins restart from 0."""
        self._last_reports.pop(engine, None)

    def _solve(self) -> CostCoefficients:
        squares, products = self._squares[:3, :3], self._squares[:3, 3]
        ridge = _RIDGE * max(float(np.trace(squares)), 1e-12) * np.eye(3)
        step, read, prefill = (np.linalg.solve(squares + ridge, products) / _SCALE[:3]).tolist()
        return CostCoefficients(max(step, 0.0), max(read, 0.0), max(prefill, 0.0))
