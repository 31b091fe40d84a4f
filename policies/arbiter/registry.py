"""The arbiter's policies by their configuration names."""

from __future__ import annotations

from typing import Literal, assert_never

from policies.arbiter.baselines import (
    FcfsPolicy,
    LeastRequestsRouter,
    MostFreeKvRouter,
    RoundRobinRouter,
    StaticRouter,
)
from policies.arbiter.kv_ledger import Ledger
from policies.arbiter.kv_lookahead import LookaheadPolicy
from policies.arbiter.policy import LengthForecast, Policy

PolicyName = Literal["static", "round_robin", "least_requests", "worst_case", "kv_lookahead"]


def make_policy(
    name: PolicyName, ledger: Ledger, length_forecast: LengthForecast, *, ends_at_first_groups: bool
) -> Policy:
    """`ends_at_first_groups`: see LookaheadPolicy; the other policies ignore it."""
    match name:
        case "static":
            return FcfsPolicy(ledger, StaticRouter(), may_oversell=True)
        case "round_robin":
            return FcfsPolicy(ledger, RoundRobinRouter(), may_oversell=True)
        case "least_requests":
            return FcfsPolicy(ledger, LeastRequestsRouter(), may_oversell=True)
        case "worst_case":
            return FcfsPolicy(ledger, MostFreeKvRouter(), may_oversell=False)
        case "kv_lookahead":
            return LookaheadPolicy(ledger, length_forecast, ends_at_first_groups=ends_at_first_groups)
        case _:
            assert_never(name)
