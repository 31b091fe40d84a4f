"""The decode cost model recovers the costs of engines from their reports."""

from collections.abc import Iterator

import pytest

from asterism.bus.messages import EngineLoadReported
from asterism.policies.arbiter.decode_cost import CostCoefficients, DecodeCostModel
from tests.policies.arbiter.leases import load, reports

COSTS = CostCoefficients(step=8e-3, read=2e-8, prefill=3e-5)
NOTHING = CostCoefficients(0.0, 0.0, 0.0)


def learn(*reports_by_engine: Iterator[EngineLoadReported]) -> DecodeCostModel:
    step_costs = DecodeCostModel()
    for each in reports_by_engine:
        for report in each:
            step_costs.add_report(report)
    return step_costs


def test_the_costs_of_engines_are_recovered_from_reports() -> None:
    assert learn(reports(COSTS, 60)).costs == pytest.approx(COSTS, rel=0.1)


def test_noise_in_measurements_averages_out() -> None:
    assert learn(reports(COSTS, 400, noise=0.1)).costs == pytest.approx(COSTS, rel=0.2)


def test_costs_are_0_until_enough_reports_have_arrived() -> None:
    assert DecodeCostModel().costs == NOTHING
    assert learn(reports(COSTS, 15)).costs == NOTHING
    assert learn(reports(COSTS, 17)).costs != NOTHING


def test_reports_of_different_engines_are_not_compared() -> None:
    step_costs = DecodeCostModel()
    for one, other in zip(reports(COSTS, 30, engine="a"), reports(COSTS, 30, engine="b", seed=1), strict=True):
        step_costs.add_report(one)
        step_costs.add_report(other)
    assert step_costs.costs == pytest.approx(COSTS, rel=0.1)


def test_the_counters_of_an_engine_that_rejoins_start_from_0() -> None:
    step_costs = learn(reports(COSTS, 30))
    before = step_costs.costs
    step_costs.remove_engine("a")
    step_costs.add_report(load("a"))
    assert step_costs.costs == before
    for report in reports(COSTS, 30, seed=1):
        step_costs.add_report(report)
    assert step_costs.costs == pytest.approx(COSTS, rel=0.1)


def test_a_constant_counter_costs_nothing_and_no_cost_is_negative() -> None:
    only_steps = learn(load("a", decode_steps=10 * number, busy_s=0.08 * number) for number in range(20))
    assert only_steps.costs == pytest.approx((8e-3, 0.0, 0.0), rel=1e-3)
    idle = learn(load("a") for _ in range(20))
    assert idle.costs == NOTHING
    slower_with_less = learn(
        load("a", decode_steps=10 * number, busy_s=0.08 * number - 1e-6 * number**2, prefilled_tokens=number**2)
        for number in range(20)
    )
    assert slower_with_less.costs.prefill == 0.0
