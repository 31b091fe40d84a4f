"""What `python -m benchmarks.scheduler` makes of its outcomes."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from analysis.simulation.model import H100, QWEN3_14B, cluster_of
from analysis.simulation.outcome import Outcome, Policy
from analysis.simulation.run import simulate
from analysis.simulation.workload import Shape, draw
from benchmarks.scheduler import OURS, figures, ratios, speed


@cache
def outcome(policy: Policy) -> Outcome:
    shape = Shape("report", 2, 2, 200.0, 0.5, 0.5, 1.0, response_tokens=600)
    return simulate(draw(shape, 0), cluster_of(QWEN3_14B, H100, 2), policy)


def test_the_keys_are_those_that_are_promised() -> None:
    keys = ("makespan_s", "lower_bound_s", "kv_utilization", "slot_utilization", "evictions", "recomputed_tokens")
    assert tuple(figures(outcome("static")))[: len(keys)] == keys


def test_a_policy_that_takes_twice_as_long_as_ours_is_at_two() -> None:
    slow = replace(outcome("static"), makespan_s=2 * outcome(OURS).makespan_s)
    assert ratios({"static": slow, OURS: outcome(OURS)}) == {"static": 2.0}


def test_the_speed_is_that_of_our_decisions() -> None:
    one = replace(outcome(OURS), decisions=100, decision_s=1e-5, worst_decision_s=2e-4, simulated_in_s=12.0)
    other = replace(one, decisions=300, decision_s=3e-5, worst_decision_s=5e-4)
    found = speed({"report": {OURS: one, "static": outcome("static")}, "one_node": {OURS: other}})
    assert found == {
        "decisions_per_s": pytest.approx(40_000),
        "worst_decision_ms": pytest.approx(0.5),
        "simulate_report_s": 12.0,
    }


def test_what_was_not_run_has_no_speed() -> None:
    found = speed({"one_node": {"static": outcome("static")}})
    assert found == {"decisions_per_s": None, "worst_decision_ms": None, "simulate_report_s": None}
