"""What is expected before a simulated step begins: the lengths that its trajectories will really have, or an earlier step's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from analysis.simulation.workload import Plan, Workload
from policies.forecast import begins
from policies.ledger import Holding
from policies.lengths import Lengths


def lengths_of(earlier: Workload) -> Lengths:
    """What a run has learned from a step whose trajectories have all ended."""
    lengths = Lengths(earlier.response_tokens)
    for plan in earlier.plans:
        begin = plan.prompt_tokens
        for number, (turn, end) in enumerate(zip(plan.turns, plan.ends, strict=True)):
            last = min(end, plan.final_tokens)
            lengths.turn_ended(number, last - begin)
            begin = last + turn.result_tokens
        lengths.trajectory_ended(0, plan.final_tokens - plan.prompt_tokens)
    return lengths


class Truth:
    """Implements policies.expectations.Learned. An oracle's: the upper limit for any estimate."""

    def __init__(self, plans: Mapping[int, Plan], limit: int) -> None:
        self.limit = limit
        self._plans = plans
        self._begins = begins(limit)

    def asked(self, holding: Holding) -> None: ...

    def leased(self, holding: Holding) -> None: ...

    def turn_ended(self, holding: Holding) -> None: ...

    def ended(self, holding: Holding) -> None: ...

    def turn_tokens(self, holding: Holding, share: float) -> int:
        plan = self._plans[holding.trajectory_id]
        return min(plan.ends[holding.request.turn], plan.final_tokens) - holding.turn_began_at

    def final_tokens(self, holding: Holding) -> float:
        return float(self._plans[holding.trajectory_id].final_tokens)

    def alive(self, holding: Holding) -> NDArray[np.float64]:
        to_go = self._plans[holding.trajectory_id].final_tokens - holding.tokens
        return (self._begins < to_go).astype(np.float64)
