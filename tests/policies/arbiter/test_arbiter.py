"""The arbiter's grants, chosen engines and reasons, with each policy and under any order of events."""

from typing import get_args
from unittest import TestCase

import pytest
from hypothesis import settings

from asterism.bus import messages as msg
from asterism.policies.arbiter.arbiter import MAX_GRANTS_PER_DECISION, Arbiter, PolicyName
from asterism.policies.decider import Send
from tests.policies.arbiter.arbiter_machine import ArbiterMachine
from tests.policies.arbiter.leases import PROMPT, RESPONSE, granted, joined, load, request, served, settled

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
BATCHING_REASON = "for requests made at the same time, then for room"
WORST_CASE = PROMPT + RESPONSE  # most tokens of a trajectory (64), and the capacity of one engine


def make_arbiter(policy: PolicyName, *capacities: int, page: int = 1) -> Arbiter:
    arbiter = Arbiter(policy, RESPONSE)
    for number, tokens in enumerate(capacities):
        arbiter.decide(0.0, joined(number, tokens, page))
    return arbiter


def place(arbiter: Arbiter, *requests: msg.LeaseRequested) -> list[str]:
    """Decide the requests, and return the engines of the grants."""
    return [grant.engine for each in requests for grant in granted(arbiter.decide(0.0, each))]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lease_is_granted_immediately_if_there_is_room(policy: PolicyName) -> None:
    *deferred, effect = settled(make_arbiter(policy, 64), 3.0, request(1))
    assert len(deferred) == (policy == "kv_lookahead")  # kv_lookahead waits for simultaneous requests
    assert effect.to == "rollout-0"
    assert isinstance(effect.message, msg.LeaseGranted)
    assert effect.message.reason
    assert effect.message == msg.LeaseGranted(1, "generator-0", WORST_CASE, 1, 0.0, effect.message.reason)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_wait_for_the_first_engine_and_the_grant_reports_the_wait(policy: PolicyName) -> None:
    arbiter = Arbiter(policy, RESPONSE)
    (deferred,) = settled(arbiter, 1.0, request(1))
    reason = BATCHING_REASON if policy == "kv_lookahead" else "no engine has joined"
    assert deferred == Send("rollout-0", msg.LeaseDeferred(1, reason))
    (effect,) = arbiter.decide(3.5, joined())
    assert isinstance(effect.message, msg.LeaseGranted)
    assert effect.message.waited_s == 2.5


@pytest.mark.parametrize("policy", ["worst_case", "kv_lookahead"])
def test_a_request_without_room_waits_until_a_trajectory_ends(policy: PolicyName) -> None:
    arbiter = make_arbiter(policy, WORST_CASE)
    settled(arbiter, 0.0, request(1))
    (deferred,) = settled(arbiter, 0.0, request(2))
    assert isinstance(deferred.message, msg.LeaseDeferred)
    assert deferred.message.reason == (BATCHING_REASON if policy == "kv_lookahead" else "no engine has room for it")
    assert served(arbiter.decide(0.0, msg.LeaseReleased(1, 30))) == [2]


@pytest.mark.parametrize("policy", ["static", "round_robin", "least_requests"])
def test_the_routing_policies_grant_every_request(policy: PolicyName) -> None:
    arbiter = make_arbiter(policy, WORST_CASE)
    assert [served(arbiter.decide(0.0, request(tid))) for tid in range(5)] == [[0], [1], [2], [3], [4]]


def test_static_assigns_each_group_a_fixed_engine() -> None:
    arbiter = make_arbiter("static", 64, 64)
    where = place(arbiter, *(request(tid, tid // 2) for tid in range(6)))
    assert where == ["generator-0"] * 2 + ["generator-1"] * 2 + ["generator-0"] * 2


def test_round_robin_chooses_the_engines_in_turn() -> None:
    arbiter = make_arbiter("round_robin", 64, 64)
    assert place(arbiter, *map(request, range(4))) == ["generator-1", "generator-0"] * 2


def test_least_requests_chooses_the_engine_with_the_fewest_running_trajectories() -> None:
    arbiter = make_arbiter("least_requests", 64, 64)
    assert place(arbiter, request(0), request(1)) == ["generator-0", "generator-1"]
    arbiter.decide(0.0, msg.LeasePaused(1, 20))
    assert place(arbiter, request(2)) == ["generator-1"]


def test_worst_case_chooses_the_engine_with_the_cache_or_else_with_the_most_free_tokens() -> None:
    arbiter = make_arbiter("worst_case", 200, 150)
    assert place(arbiter, *map(request, range(3))) == ["generator-0", "generator-1", "generator-0"]
    arbiter.decide(0.0, msg.LeasePaused(1, 20))
    assert place(arbiter, request(1, tokens=25, turn=1, lease=2)) == ["generator-1"]


def test_under_worst_case_only_trajectories_with_a_cache_overtake_new_trajectories() -> None:
    arbiter = make_arbiter("worst_case", WORST_CASE + 10)
    arbiter.decide(0.0, request(1))
    arbiter.decide(0.0, request(2))
    arbiter.decide(0.0, request(3, prompt=1, tokens=1))
    arbiter.decide(0.0, msg.LeasePaused(1, 20))
    assert served(arbiter.decide(0.0, request(1, tokens=25, turn=1, lease=2))) == [1]
    assert served(arbiter.decide(0.0, msg.LeaseReleased(1, 30))) == [2]


def test_a_withdrawn_request_does_not_block_later_requests() -> None:
    arbiter = make_arbiter("worst_case", WORST_CASE + 10)
    arbiter.decide(0.0, request(1))
    arbiter.decide(0.0, request(2))
    arbiter.decide(0.0, request(3, response=2))
    assert served(arbiter.decide(0.0, msg.LeaseReleased(2, PROMPT))) == [3]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_grants_a_bounded_number_of_requests_and_continues_by_a_message(policy: PolicyName) -> None:
    arbiter = Arbiter(policy, RESPONSE)
    for tid in range(2 * MAX_GRANTS_PER_DECISION + 3):
        settled(arbiter, 0.0, request(tid))
    counts: list[int] = []
    effects = arbiter.decide(0.0, joined(0, 100_000))
    while effects:
        counts.append(len(served(effects)))
        continued = effects[-1] == Send("head/arbiter", msg.AdmissionContinued())
        effects = arbiter.decide(0.0, msg.AdmissionContinued()) if continued else []
    assert counts == [MAX_GRANTS_PER_DECISION, MAX_GRANTS_PER_DECISION, 3]


def test_the_arbiter_answers_each_load_report_with_a_report_of_its_ledger() -> None:
    arbiter = make_arbiter("kv_lookahead", 64, page=16)
    settled(arbiter, 0.0, request(1))
    settled(arbiter, 0.0, request(2))
    (report,) = arbiter.decide(0.0, load())
    assert report == Send("launcher", msg.LedgerReported("generator-0", 64, 64, 1, 0, 0, 0))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_arbiter_of_a_restarted_run_has_no_requests_and_waits_for_engines(policy: PolicyName) -> None:
    arbiter = make_arbiter(policy, 64)
    for tid in range(2 * MAX_GRANTS_PER_DECISION):
        arbiter.decide(0.0, request(tid))
    arbiter.decide(0.0, msg.RunStarted(0, msg.BufferCursor()))
    arbiter.decide(0.0, joined())
    assert served(settled(arbiter, 0.0, request(1))) == [1]


def test_new_trajectories_wait_until_all_simultaneous_requests_have_arrived() -> None:
    arbiter = make_arbiter("kv_lookahead", 2 * WORST_CASE)
    deferrals = (
        Send("rollout-0", msg.LeaseDeferred(1, BATCHING_REASON)),
        Send("rollout-0", msg.LeaseDeferred(2, BATCHING_REASON)),
    )
    assert arbiter.decide(0.0, request(1)) == [deferrals[0], Send("head/arbiter", msg.AdmissionContinued())]
    assert arbiter.decide(0.0, request(2)) == [deferrals[1]]  # the arbiter has already sent the continuation
    assert served(arbiter.decide(0.0, msg.AdmissionContinued())) == [1, 2]


def test_requests_of_started_trajectories_are_not_batched() -> None:
    arbiter = make_arbiter("kv_lookahead", 2 * WORST_CASE)
    settled(arbiter, 0.0, request(1))
    arbiter.decide(0.0, msg.LeasePaused(1, 20))
    arbiter.decide(0.0, request(2))
    assert served(arbiter.decide(0.0, request(1, tokens=25, turn=1, lease=2)))[0] == 1


def test_unrelated_messages_are_refused() -> None:
    with pytest.raises(msg.ProtocolError, match="does not accept StepRequested"):
        Arbiter().decide(0.0, msg.StepRequested(1, 0))


def build_machine_test(policy: PolicyName) -> type[TestCase]:
    machine = type(f"{policy}_machine", (ArbiterMachine,), {"policy": policy})
    machine.TestCase.settings = settings(stateful_step_count=40)
    return pytest.mark.slow(machine.TestCase)


TestStatic = build_machine_test("static")
TestRoundRobin = build_machine_test("round_robin")
TestLeastRequests = build_machine_test("least_requests")
TestWorstCase = build_machine_test("worst_case")
TestLookahead = build_machine_test("kv_lookahead")
