"""What decode steps, cached tokens and prefilled ones take, found again in reports of engines that take known times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bus.messages import EngineLoadReported
from policies.step_costs import Costs, StepCosts
from tests.policies.leases import load, reports

COSTS = Costs(step=8e-3, read=2e-8, prefill=3e-5)
NOTHING = Costs(0.0, 0.0, 0.0)


def learned(*told: Iterator[EngineLoadReported]) -> StepCosts:
    step_costs = StepCosts()
    for each in told:
        for report in each:
            step_costs.note(report)
    return step_costs


def test_what_engines_take_is_found_again() -> None:
    assert learned(reports(COSTS, 60)).costs == pytest.approx(COSTS, rel=0.1)


def test_measurements_that_scatter_are_evened_out() -> None:
    assert learned(reports(COSTS, 400, noise=0.1)).costs == pytest.approx(COSTS, rel=0.2)


def test_before_enough_has_been_reported_nothing_is_known() -> None:
    assert StepCosts().costs == NOTHING
    assert learned(reports(COSTS, 15)).costs == NOTHING
    assert learned(reports(COSTS, 17)).costs != NOTHING


def test_each_engine_is_compared_with_itself_alone() -> None:
    step_costs = StepCosts()
    for one, other in zip(reports(COSTS, 30, engine="a"), reports(COSTS, 30, engine="b", seed=1), strict=True):
        step_costs.note(one)
        step_costs.note(other)
    assert step_costs.costs == pytest.approx(COSTS, rel=0.1)


def test_an_engine_that_left_and_came_back_counts_from_0() -> None:
    step_costs = learned(reports(COSTS, 30))
    before = step_costs.costs
    step_costs.forget("a")
    step_costs.note(load("a"))
    assert step_costs.costs == before
    for report in reports(COSTS, 30, seed=1):
        step_costs.note(report)
    assert step_costs.costs == pytest.approx(COSTS, rel=0.1)


def test_what_has_not_varied_costs_nothing_and_no_cost_is_below_0() -> None:
    only_steps = learned(load("a", steps=10 * number, busy_s=0.08 * number) for number in range(20))
    assert only_steps.costs == pytest.approx((8e-3, 0.0, 0.0), rel=1e-3)
    idle = learned(load("a") for _ in range(20))
    assert idle.costs == NOTHING
    slower_with_less = learned(
        load("a", steps=10 * number, busy_s=0.08 * number - 1e-6 * number**2, prefilled=number**2)
        for number in range(20)
    )
    assert slower_with_less.costs.prefill == 0.0
