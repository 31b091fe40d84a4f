"""Retractions by a real server whose cache holds less than half of the tokens of its trajectories."""

import asyncio
import re

import pytest
from msgspec.structs import replace

from asterism.analysis.simulation.workload import draw_workload
from asterism.policies.arbiter.arbiter import PolicyName
from benchmarks.support.sglang.small_cache_server import LONG, ScarceServerOutcome, find_longest, measure
from tests.sglang.bench import SharedServer
from tests.sglang.serving import LONGEST, SCARCE_TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.sglang, pytest.mark.timeout(1800)]

SHAPE = replace(LONG, prompts=2, siblings=8, response_tokens=160)
POLICIES: tuple[PolicyName, ...] = ("least_requests", "kv_lookahead")


@pytest.fixture(scope="module")
def outcomes(
    loop: asyncio.Runner, servers: tuple[SharedServer, SharedServer]
) -> dict[PolicyName, tuple[ScarceServerOutcome, int]]:
    """Run each policy; return its outcome and the number of retractions in the server's log by policy."""
    scarce = servers[1]

    async def measure_policy(policy: PolicyName) -> tuple[ScarceServerOutcome, int]:
        await scarce.start()
        sglang = replace(scarce.requirements.sglang, external_urls=(scarce.server.url,))
        before = count_logged_retractions(scarce)
        outcome = await measure(scarce.requirements._replace(sglang=sglang), SHAPE, policy, seed=0)
        return outcome, count_logged_retractions(scarce) - before

    return {policy: loop.run(measure_policy(policy)) for policy in POLICIES}


def count_logged_retractions(shared: SharedServer) -> int:
    return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", shared.log.read_text())))


def test_the_cache_has_room_for_each_trajectory_but_not_for_all():
    work = draw_workload(SHAPE, seed=0)
    assert find_longest(work) <= LONGEST
    assert work.demand_tokens > 2 * SCARCE_TOKENS


def test_kv_lookahead_avoids_the_retractions_of_least_requests(
    outcomes: dict[PolicyName, tuple[ScarceServerOutcome, int]],
) -> None:
    assert outcomes["least_requests"][0].retractions > 0
    assert outcomes["kv_lookahead"][0].retractions == 0


def test_every_retraction_of_the_server_is_counted(outcomes: dict[PolicyName, tuple[ScarceServerOutcome, int]]) -> None:
    assert {policy: outcome.retractions for policy, (outcome, _) in outcomes.items()} == {
        policy: retractions for policy, (_, retractions) in outcomes.items()
    }
