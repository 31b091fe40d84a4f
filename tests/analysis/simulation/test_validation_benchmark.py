"""What `python -m benchmarks.validation` asks of a run, and makes of its simulations."""

from __future__ import annotations

import argparse
from typing import get_args

import pytest

from analysis.simulation.model import H100, QWEN3_14B, cluster_of
from analysis.simulation.run import simulate
from analysis.simulation.workload import Shape, draw
from benchmarks import validation
from benchmarks._policies import some_of
from configs.schema import Dialogue, Run
from policies.scheduling import PolicyName

RUN = Run(name="any", dialogue=Dialogue(prompt_tokens=20, response_tokens=200))


def test_the_caches_hold_the_asked_share_of_the_demand_and_one_trajectory_at_least() -> None:
    assert validation.with_caches(RUN, 30_000, 0.25).engine.kv_tokens * validation.ENGINES == 7500
    assert validation.with_caches(RUN, 100, 0.25).engine.kv_tokens == 220 + RUN.engine.page_tokens


def test_waits_are_means_over_all_steps_trajectories_and_leave_no_cause_out() -> None:
    shape = Shape("small", 1, 2, 200.0, 0.5, 0.5, 1.0, response_tokens=600)
    outcomes = [simulate(draw(shape, seed), cluster_of(QWEN3_14B, H100, 1), "kv") for seed in (0, 1)]
    waits_s = validation._waits_s(outcomes)  # pyright: ignore[reportPrivateUsage]
    total_s = sum(sum(outcome.waits_s.values()) for outcome in outcomes)
    assert 4 * sum(waits_s.values()) == pytest.approx(total_s, abs=0.01)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no policy 'oracle'; there are static"):
        some_of(get_args(PolicyName))("kv,oracle")
    assert some_of(get_args(PolicyName))("kv,static") == ("kv", "static")
