"""What an oracle expects: the lengths that trajectories will really have. The upper limit for any estimate."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from analysis.simulation.workload import Plan
from policies.forecast import begins
from policies.ledger import Holding


class Truth:
    """Implements policies.expectations.Learned."""

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
