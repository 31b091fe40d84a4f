"""Builds a simulation's arbiter with its length forecast: from the true lengths, or from an earlier step."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from asterism.analysis.simulation.outcome import SimulatedPolicy
from asterism.analysis.simulation.workload import TrajectoryPlan, Workload
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.arbiter.kv_demand import compute_interval_starts
from asterism.policies.arbiter.kv_ledger import KvAccount
from asterism.policies.arbiter.length_estimates import LearnedLengthForecast
from asterism.policies.arbiter.length_stats import LengthStats


def build_length_stats(earlier: Workload) -> LengthStats:
    """Build the length statistics of a completed step."""
    lengths = LengthStats(earlier.response_tokens)
    for plan in earlier.plans:
        begin = plan.prompt_tokens
        for number, (turn, end) in enumerate(zip(plan.turns, plan.ends, strict=True)):
            last = min(end, plan.final_tokens)
            lengths.add_turn(number, last - begin)
            begin = last + turn.result_tokens
        lengths.survival.add_ended(0, plan.final_tokens - plan.prompt_tokens)
    return lengths


class OracleLengthForecast:
    """An OnlineLengthForecast (policies/arbiter/length_estimates.py) with the true lengths: the best forecast."""

    def __init__(self, plans: Mapping[int, TrajectoryPlan], limit: int) -> None:
        self.limit = limit
        self._plans = plans
        self._interval_starts = compute_interval_starts(limit)

    def on_lease_requested(self, account: KvAccount) -> None: ...

    def on_leased(self, account: KvAccount) -> None: ...

    def on_turn_ended(self, account: KvAccount) -> None: ...

    def on_trajectory_ended(self, account: KvAccount) -> None: ...

    def estimate_turn_tokens(self, account: KvAccount, quantile: float) -> int:
        plan = self._plans[account.trajectory_id]
        return min(plan.ends[account.request.turn], plan.final_tokens) - account.turn_start_tokens

    def estimate_final_tokens(self, account: KvAccount) -> float:
        return float(self._plans[account.trajectory_id].final_tokens)

    def survival_curve(self, account: KvAccount) -> NDArray[np.float64]:
        to_go = self._plans[account.trajectory_id].final_tokens - account.tokens
        return (self._interval_starts < to_go).astype(np.float64)


def build_arbiter(policy: SimulatedPolicy, workload: Workload, earlier: Workload | None = None) -> Arbiter:
    limit = workload.response_tokens
    if policy == "oracle":
        plans = {plan.trajectory_id: plan for plan in workload.plans}
        return Arbiter("kv_lookahead", limit, forecast_factory=lambda: OracleLengthForecast(plans, limit))
    return Arbiter(
        policy, limit, forecast_factory=earlier and (lambda: LearnedLengthForecast(limit, build_length_stats(earlier)))
    )
