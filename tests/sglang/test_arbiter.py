"""The arbiter before a real server whose cache holds less than half of what its trajectories want: who has to be retracted."""

from __future__ import annotations

import asyncio
import re

import pytest
from msgspec.structs import replace

from analysis.simulation.workload import draw
from benchmarks._scarce_server import LONG, Outcome, longest_of, measure
from policies.scheduling import PolicyName
from tests.sglang.bench import Shared
from tests.sglang.serving import LONGEST, SCARCE_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

SHAPE = replace(LONG, prompts=2, siblings=8, response_tokens=160)
POLICIES: tuple[PolicyName, ...] = ("least_requests", "kv_lookahead")


@pytest.fixture(scope="module")
def outcomes(loop: asyncio.Runner, servers: tuple[Shared, Shared]) -> dict[PolicyName, tuple[Outcome, int]]:
    """Of each policy, with how many retractions the server says that it made."""
    scarce = servers[1]

    async def measured(policy: PolicyName) -> tuple[Outcome, int]:
        await scarce.start()
        sglang = replace(scarce.wanted.sglang, attach=(scarce.server.url,))
        before = said(scarce)
        outcome = await measure(scarce.wanted._replace(sglang=sglang), SHAPE, policy, seed=0)
        return outcome, said(scarce) - before

    return {policy: loop.run(measured(policy)) for policy in POLICIES}


def said(shared: Shared) -> int:
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", shared.log.read_text())))


def test_the_cache_is_too_small_for_all_and_large_enough_for_each():
    work = draw(SHAPE, seed=0)
    assert longest_of(work) <= LONGEST
    assert work.demand_tokens > 2 * SCARCE_TOKENS


def test_kv_lookahead_needs_no_retraction_where_least_requests_does(
    outcomes: dict[PolicyName, tuple[Outcome, int]],
) -> None:
    assert outcomes["least_requests"][0].retractions > 0
    assert outcomes["kv_lookahead"][0].retractions == 0


def test_every_retraction_of_the_server_is_counted(outcomes: dict[PolicyName, tuple[Outcome, int]]) -> None:
    assert {policy: outcome.retractions for policy, (outcome, _) in outcomes.items()} == {
        policy: retractions for policy, (_, retractions) in outcomes.items()
    }


def test_both_come_to_the_same_tokens(outcomes: dict[PolicyName, tuple[Outcome, int]]) -> None:
    assert len({outcome.digest for outcome, _ in outcomes.values()}) == 1
