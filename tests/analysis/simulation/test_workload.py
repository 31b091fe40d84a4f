"""Drawn lengths of workloads match the stated distributions, and plans follow the limits."""

import numpy as np
import pytest
from msgspec.structs import replace

from asterism.analysis.simulation.workload import (
    PlannedTurn,
    Workload,
    WorkloadShape,
    build_plan,
    compute_median_for_limit,
    draw_workload,
)
from asterism.analysis.simulation.workloads import SHAPES, draw_named_workload
from asterism.configs.errors import UnusableInput

SHAPE = WorkloadShape(
    "test", prompts=100, siblings=8, median_tokens=900, group_sigma=0.5, own_sigma=0.3, mean_calls=2.0
)


def lengths(workload: Workload) -> np.ndarray:
    """Return response tokens [groups, siblings]."""
    flat = [plan.final_tokens - plan.prompt_tokens for plan in workload.plans]
    return np.array(flat, dtype=float).reshape(SHAPE.prompts, SHAPE.siblings)


def test_a_seed_determines_the_workload() -> None:
    small = replace(SHAPE, prompts=10)
    assert draw_workload(small, 1) == draw_workload(small, 1)
    assert draw_workload(small, 1) != draw_workload(small, 2)


def test_lengths_have_the_stated_median_and_siblings_correlate() -> None:
    logs = np.log(lengths(draw_workload(replace(SHAPE, mean_calls=0.0, response_tokens=100_000), 0)))
    assert np.exp(np.median(logs)) == pytest.approx(900, rel=0.15)
    assert logs.mean(axis=1).std() == pytest.approx((0.5**2 + 0.3**2 / 8) ** 0.5, rel=0.15)
    assert (logs - logs.mean(axis=1, keepdims=True)).std() == pytest.approx(0.3, rel=0.15)


def test_siblings_share_a_prompt_and_trajectory_ids_are_unique() -> None:
    plans = draw_workload(SHAPE, 0).plans
    assert [plan.trajectory_id for plan in plans] == list(range(800))
    assert len({(plan.group_id, plan.prompt_tokens) for plan in plans}) == SHAPE.prompts


def test_the_stated_share_of_a_heavy_tail_reaches_the_limit() -> None:
    shape = WorkloadShape(
        "tail", 200, 8, compute_median_for_limit(0.1, 4000, 1.0), group_sigma=0.6, own_sigma=0.8, mean_calls=0.0
    )
    plans = draw_workload(replace(shape, response_tokens=4000), 0).plans
    at_limit = [plan.ends[-1] > plan.final_tokens for plan in plans]
    assert np.mean(at_limit) == pytest.approx(0.1, abs=0.03)


def test_the_stated_share_of_calls_times_out() -> None:
    workload = draw_workload(WorkloadShape("tools", 100, 8, 900, 0.5, 0.3, mean_calls=3.0, time_out_share=0.1), 0)
    latencies = [turn.tool_s for plan in workload.plans for turn in plan.turns if turn.result_tokens]
    assert np.mean(np.array(latencies) == 4.0) == pytest.approx(0.1, abs=0.03)
    assert np.median(latencies) == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(
    ("turns", "ends", "final_tokens", "generated_tokens"),
    [
        ([PlannedTurn(50, 0.1, 20), PlannedTurn(40), PlannedTurn(9)], (60, 120), 110, 80),
        ([PlannedTurn(50, 0.1, 50), PlannedTurn(40)], (60,), 60, 50),  # a result without room ends the trajectory
        ([PlannedTurn(50, 0.1, 20), PlannedTurn(30)], (60, 110), 110, 80),  # an answer that ends at the limit
    ],
)
def test_a_turn_beyond_the_limit_is_cut_there(
    turns: list[PlannedTurn], ends: tuple[int, ...], final_tokens: int, generated_tokens: int
) -> None:
    plan = build_plan(0, 0, 10, turns, 100)
    assert (plan.ends, plan.final_tokens, plan.generated_tokens) == (ends, final_tokens, generated_tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_workload_fits_its_cluster_at_any_scale(name: str) -> None:
    workload, cluster = draw_named_workload(name, 0, scale=0.01)
    longest = max(plan.prompt_tokens for plan in workload.plans) + workload.response_tokens
    assert cluster.kv_tokens > longest
    assert cluster.engines == 1


def test_one_nodes_caches_hold_a_third_of_the_demand() -> None:
    workload, cluster = draw_named_workload("one_node", 0, scale=0.125)
    assert cluster.kv_tokens * cluster.engines == pytest.approx(workload.demand_tokens / 3, abs=1)


def test_an_unknown_workload_is_refused_with_the_known_names() -> None:
    with pytest.raises(UnusableInput, match="workloads: report, one_node, heavy_tail, tool_bound"):
        draw_named_workload("reprot", 0)
