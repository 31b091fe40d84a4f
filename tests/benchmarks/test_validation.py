"""What `python -m benchmarks.validation` asks of a run, and makes of its simulations."""

from __future__ import annotations

import argparse
from typing import get_args

import pytest

from analysis.simulation.cluster_model import H100, QWEN3_14B, build_cluster
from analysis.simulation.simulate import simulate
from analysis.simulation.workload import WorkloadShape, draw_workload
from benchmarks import validation
from benchmarks.support.policies_flag import make_policies_parser
from configs.schema import DialogueConfig, RunConfig
from policies.arbiter.registry import PolicyName

RUN = RunConfig(name="any", dialogue=DialogueConfig(prompt_tokens=20, response_tokens=200))


def test_the_caches_hold_the_asked_share_of_the_demand_and_one_trajectory_at_least() -> None:
    assert validation.shrink_caches(RUN, 30_000, 0.25).engine.kv_tokens * validation.ENGINES == 7500
    assert validation.shrink_caches(RUN, 100, 0.25).engine.kv_tokens == 220 + RUN.engine.page_tokens


def test_waits_are_means_over_all_steps_trajectories_and_leave_no_cause_out() -> None:
    shape = WorkloadShape("small", 1, 2, 200.0, 0.5, 0.5, 1.0, response_tokens=600)
    outcomes = [
        simulate(draw_workload(shape, seed), build_cluster(QWEN3_14B, H100, 1), "worst_case") for seed in (0, 1)
    ]
    waits_s = validation._sum_waits_s(outcomes)  # pyright: ignore[reportPrivateUsage]
    total_s = sum(sum(outcome.waits_s.values()) for outcome in outcomes)
    assert 4 * sum(waits_s.values()) == pytest.approx(total_s, abs=0.01)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no policy 'oracle'; there are static"):
        make_policies_parser(get_args(PolicyName))("worst_case,oracle")
    assert make_policies_parser(get_args(PolicyName))("worst_case,static") == ("worst_case", "static")
