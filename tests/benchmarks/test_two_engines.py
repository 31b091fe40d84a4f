"""Two engine processes under the arbiter: same tokens by every policy, exact recomputed tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from analysis.simulation.workload import draw_workload
from benchmarks.generation import write_checkpoint
from benchmarks.support.planned_lengths import REASONING
from benchmarks.support.two_engines import TwoEngineOutcome, compute_differing_share, measure
from policies.arbiter.registry import PolicyName

pytestmark = pytest.mark.slow

SHAPE = replace(REASONING, prompts=3)
POLICIES: tuple[PolicyName, ...] = ("least_requests", "worst_case", "kv_lookahead")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyName, TwoEngineOutcome]:
    folder: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, seed=0)
    return {policy: asyncio.run(measure(folder, SHAPE, policy, seed=0)) for policy in POLICIES}


def test_the_share_of_differing_trajectories_counts_each_once(outcomes: dict[PolicyName, TwoEngineOutcome]) -> None:
    outcome = replace(outcomes["worst_case"], digests=("a", "b", "c", "d"))
    others = [replace(outcome, digests=digests) for digests in (("a", "x", "c", "d"), ("a", "y", "c", "z"))]
    assert compute_differing_share([outcome, outcome]) == 0.0
    assert compute_differing_share([outcome, *others]) == 0.5


def test_every_planned_token_is_generated_once(outcomes: dict[PolicyName, TwoEngineOutcome]) -> None:
    planned = draw_workload(SHAPE, seed=0).generated_tokens
    assert {outcome.generated_tokens for outcome in outcomes.values()} == {planned}


def test_a_policy_without_migration_or_eviction_recomputes_nothing(
    outcomes: dict[PolicyName, TwoEngineOutcome],
) -> None:
    found = outcomes["worst_case"]
    assert (found.recomputed_tokens, found.evicted_tokens, found.preempted, found.migrations) == (0, 0, 0, 0)


def test_a_policy_that_oversells_causes_recomputation(outcomes: dict[PolicyName, TwoEngineOutcome]) -> None:
    found = outcomes["least_requests"]
    assert found.evicted_tokens > 0
    assert found.recomputed_tokens > found.generated_tokens / 4
