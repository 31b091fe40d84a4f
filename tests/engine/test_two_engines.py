"""Two engines under the arbiter, each in its process: whatever the policy, the same tokens; and what was computed twice is
counted to the token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from analysis.simulation.workload import draw
from benchmarks._planned import REASONING
from benchmarks._two_engines import Outcome, measure
from benchmarks.generation import write_checkpoint
from policies.scheduling import PolicyName

pytestmark = pytest.mark.slow

SHAPE = replace(REASONING, prompts=3)
POLICIES: tuple[PolicyName, ...] = ("least_requests", "kv", "kv_lookahead")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyName, Outcome]:
    folder: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, seed=0)
    return {policy: asyncio.run(measure(folder, SHAPE, policy, seed=0)) for policy in POLICIES}


def test_every_policy_comes_to_the_same_tokens(outcomes: dict[PolicyName, Outcome]) -> None:
    assert len({outcome.digest for outcome in outcomes.values()}) == 1


def test_every_planned_token_is_generated_once(outcomes: dict[PolicyName, Outcome]) -> None:
    planned = draw(SHAPE, seed=0).generated_tokens
    assert {outcome.generated_tokens for outcome in outcomes.values()} == {planned}


def test_a_policy_that_never_moves_or_gives_up_a_cache_computes_nothing_twice(
    outcomes: dict[PolicyName, Outcome],
) -> None:
    found = outcomes["kv"]
    assert (found.recomputed_tokens, found.evicted_tokens, found.preempted, found.migrations) == (0, 0, 0, 0)


def test_a_policy_that_oversells_makes_engines_compute_again(outcomes: dict[PolicyName, Outcome]) -> None:
    found = outcomes["least_requests"]
    assert found.evicted_tokens > 0
    assert found.recomputed_tokens > found.generated_tokens / 4
