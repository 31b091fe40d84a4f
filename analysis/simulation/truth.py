"""What an oracle expects: the lengths that trajectories will really have. The upper limit for any estimate."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.simulation.workload import Plan
from policies.ledger import Holding


class Truth:
    """Implements policies.expectations.Learned."""

    def __init__(self, plans: Mapping[int, Plan], limit: int) -> None:
        self.limit = limit
        self._plans = plans

    def asked(self, holding: Holding) -> None: ...

    def turn_ended(self, holding: Holding) -> None: ...

    def ended(self, holding: Holding) -> None: ...

    def turn_tokens(self, holding: Holding, share: float) -> int:
        plan = self._plans[holding.trajectory_id]
        return min(plan.ends[holding.request.turn], plan.final_tokens) - holding.turn_began_at

    def final_tokens(self, holding: Holding) -> float:
        return float(self._plans[holding.trajectory_id].final_tokens)
