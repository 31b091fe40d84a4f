"""The arbiter's policies by their names in the configuration."""

from __future__ import annotations

from typing import Literal, assert_never

from policies.admission import InOrder, LeastRequests, MostFree, Policy, RoundRobin, Static
from policies.ledger import Ledger
from policies.lookahead import Expected, Lookahead

PolicyName = Literal["static", "round_robin", "least_requests", "kv", "kv_lookahead"]


def policy_of(name: PolicyName, ledger: Ledger, expected: Expected, *, completes: bool) -> Policy:
    """`completes`: see Lookahead; the others do not look at it."""
    match name:
        case "static":
            return InOrder(ledger, Static(), oversells=True)
        case "round_robin":
            return InOrder(ledger, RoundRobin(), oversells=True)
        case "least_requests":
            return InOrder(ledger, LeastRequests(), oversells=True)
        case "kv":
            return InOrder(ledger, MostFree(), oversells=False)
        case "kv_lookahead":
            return Lookahead(ledger, expected, completes=completes)
        case _:
            assert_never(name)
