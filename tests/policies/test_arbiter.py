"""The arbiter under each of its policies: who is granted what, where, and why; and under any order of events."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import settings

from bus.messages import (
    AdmissionContinued,
    BufferCursor,
    CacheReleased,
    EngineLeft,
    LeaseDeferred,
    LeaseGranted,
    LeaseParked,
    LeaseReleased,
    LedgerReported,
    ProtocolError,
    RunStarted,
    StepRequested,
)
from policies.arbiter import GRANTS, Arbiter
from policies.decider import Send
from policies.scheduling import PolicyName
from tests.policies.arbiter_machine import ArbiterMachine
from tests.policies.leases import PROMPT, RESPONSE, joined, load, request, served, settled

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
GATHERS = "for all that ask at the same time, then for room"
WHOLE = PROMPT + RESPONSE  # 64 tokens: the worst case, and what one engine here has


def arbiter_with(policy: PolicyName, *capacities: int, page: int = 1) -> Arbiter:
    arbiter = Arbiter(policy, RESPONSE)
    for number, tokens in enumerate(capacities):
        arbiter.decide(0.0, joined(number, tokens, page))
    return arbiter


def engines_of(effects: list[Send]) -> list[str]:
    return [effect.message.engine for effect in effects if isinstance(effect.message, LeaseGranted)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lease_is_granted_at_once_where_there_is_room(policy: PolicyName) -> None:
    *deferred, effect = settled(arbiter_with(policy, 64), 3.0, request(1))
    assert len(deferred) == (policy == "kv_lookahead")  # for others that ask at the same time
    assert effect.to == "rollout-0"
    assert isinstance(effect.message, LeaseGranted)
    assert effect.message.reason
    assert effect.message == LeaseGranted(1, "generator-0", WHOLE, 1, 0.0, effect.message.reason)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_wait_for_the_first_engine_to_join_and_the_grant_says_how_long(policy: PolicyName) -> None:
    arbiter = Arbiter(policy, RESPONSE)
    (deferred,) = settled(arbiter, 1.0, request(1))
    reason = GATHERS if policy == "kv_lookahead" else "no engine has joined"
    assert deferred == Send("rollout-0", LeaseDeferred(1, reason))
    (effect,) = arbiter.decide(3.5, joined())
    assert isinstance(effect.message, LeaseGranted)
    assert effect.message.waited_s == 2.5


@pytest.mark.parametrize("policy", ["kv", "kv_lookahead"])
def test_who_finds_no_room_waits_until_somebody_ends(policy: PolicyName) -> None:
    arbiter = arbiter_with(policy, WHOLE)
    settled(arbiter, 0.0, request(1))
    (deferred,) = settled(arbiter, 0.0, request(2))
    assert isinstance(deferred.message, LeaseDeferred)
    assert deferred.message.reason == (GATHERS if policy == "kv_lookahead" else "no engine has room for it")
    assert served(arbiter.decide(0.0, LeaseReleased(1, 30))) == [2]


@pytest.mark.parametrize("policy", ["static", "round_robin", "least_requests"])
def test_the_simple_policies_never_let_anybody_wait(policy: PolicyName) -> None:
    arbiter = arbiter_with(policy, WHOLE)
    assert [served(arbiter.decide(0.0, request(tid))) for tid in range(5)] == [[0], [1], [2], [3], [4]]


def test_static_gives_each_group_an_engine_whatever_happens() -> None:
    arbiter = arbiter_with("static", 64, 64)
    where = [engines_of(list(arbiter.decide(0.0, request(tid, tid // 2)))) for tid in range(6)]
    assert where == [["generator-0"]] * 2 + [["generator-1"]] * 2 + [["generator-0"]] * 2


def test_round_robin_takes_the_engines_in_turn() -> None:
    arbiter = arbiter_with("round_robin", 64, 64)
    where = [engines_of(list(arbiter.decide(0.0, request(tid)))) for tid in range(4)]
    assert where == [["generator-1"], ["generator-0"]] * 2


def test_a_trajectory_that_moves_loses_its_cache_where_it_was() -> None:
    arbiter = arbiter_with("round_robin", 64, 64)
    arbiter.decide(0.0, request(1))
    arbiter.decide(0.0, LeaseParked(1, 20))
    moved = arbiter.decide(0.0, request(1, tokens=25, turn=1, lease=2))
    assert moved[0] == Send("generator-1", CacheReleased(1, 1))
    assert engines_of(list(moved)) == ["generator-0"]


def test_least_requests_takes_the_engine_where_the_fewest_run() -> None:
    arbiter = arbiter_with("least_requests", 64, 64)
    where = [engines_of(list(arbiter.decide(0.0, request(tid)))) for tid in range(2)]
    assert where == [["generator-0"], ["generator-1"]]
    arbiter.decide(0.0, LeaseParked(1, 20))
    assert engines_of(list(arbiter.decide(0.0, request(2)))) == ["generator-1"]


def test_kv_takes_the_engine_with_the_most_free_tokens_and_returns_to_its_cache() -> None:
    arbiter = arbiter_with("kv", 200, 150)
    where = [engines_of(list(arbiter.decide(0.0, request(tid)))) for tid in range(3)]
    assert where == [["generator-0"], ["generator-1"], ["generator-0"]]
    arbiter.decide(0.0, LeaseParked(1, 20))
    assert engines_of(list(arbiter.decide(0.0, request(1, tokens=25, turn=1, lease=2)))) == ["generator-1"]


def test_under_kv_nobody_overtakes_one_that_never_had_a_lease_but_who_has_its_room_already() -> None:
    arbiter = arbiter_with("kv", WHOLE + 10)
    arbiter.decide(0.0, request(1))
    arbiter.decide(0.0, request(2))
    arbiter.decide(0.0, request(3, prompt=1, tokens=1))
    arbiter.decide(0.0, LeaseParked(1, 20))
    assert served(arbiter.decide(0.0, request(1, tokens=25, turn=1, lease=2))) == [1]
    assert served(arbiter.decide(0.0, LeaseReleased(1, 30))) == [2]


def test_a_request_that_is_withdrawn_lets_those_behind_it_pass() -> None:
    arbiter = arbiter_with("kv", WHOLE + 10)
    arbiter.decide(0.0, request(1))
    arbiter.decide(0.0, request(2))
    arbiter.decide(0.0, request(3, response=2))
    assert served(arbiter.decide(0.0, LeaseReleased(2, PROMPT))) == [3]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_ran_on_an_engine_that_left_asks_again_and_goes_elsewhere(policy: PolicyName) -> None:
    arbiter = arbiter_with(policy, 64)
    settled(arbiter, 0.0, request(1))
    arbiter.decide(0.0, EngineLeft("generator-0", "died"))
    (deferred,) = arbiter.decide(0.0, request(1, tokens=12, lease=2))
    assert isinstance(deferred.message, LeaseDeferred)
    assert engines_of(list(arbiter.decide(0.0, joined(1)))) == ["generator-1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_decision_grants_a_bounded_number_and_goes_on_by_a_message_to_itself(policy: PolicyName) -> None:
    arbiter = Arbiter(policy, RESPONSE)
    for tid in range(2 * GRANTS + 3):
        settled(arbiter, 0.0, request(tid))
    counts: list[int] = []
    effects = arbiter.decide(0.0, joined(0, 100_000))
    while effects:
        counts.append(len(served(effects)))
        continued = effects[-1] == Send("head/arbiter", AdmissionContinued())
        effects = arbiter.decide(0.0, AdmissionContinued()) if continued else []
    assert counts == [GRANTS, GRANTS, 3]


def test_the_books_are_reported_beside_each_measurement() -> None:
    arbiter = arbiter_with("kv_lookahead", 64, page=16)
    settled(arbiter, 0.0, request(1))
    settled(arbiter, 0.0, request(2))
    (report,) = arbiter.decide(0.0, load())
    assert report == Send("launcher", LedgerReported("generator-0", 64, 64, 1, 0, 0, 0))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_starts_anew_owes_nobody_and_waits_for_engines_to_join(policy: PolicyName) -> None:
    arbiter = arbiter_with(policy, 64)
    for tid in range(2 * GRANTS):
        arbiter.decide(0.0, request(tid))
    arbiter.decide(0.0, RunStarted(0, BufferCursor()))
    arbiter.decide(0.0, joined())
    assert served(settled(arbiter, 0.0, request(1))) == [1]


def test_new_ones_wait_until_all_that_ask_at_the_same_time_are_known() -> None:
    arbiter = arbiter_with("kv_lookahead", 2 * WHOLE)
    told = Send("rollout-0", LeaseDeferred(1, GATHERS)), Send("rollout-0", LeaseDeferred(2, GATHERS))
    assert arbiter.decide(0.0, request(1)) == [told[0], Send("head/arbiter", AdmissionContinued())]
    assert arbiter.decide(0.0, request(2)) == [told[1]]  # it will go on already
    assert served(arbiter.decide(0.0, AdmissionContinued())) == [1, 2]


def test_who_was_begun_is_not_gathered() -> None:
    arbiter = arbiter_with("kv_lookahead", 2 * WHOLE)
    settled(arbiter, 0.0, request(1))
    arbiter.decide(0.0, LeaseParked(1, 20))
    arbiter.decide(0.0, request(2))
    assert served(arbiter.decide(0.0, request(1, tokens=25, turn=1, lease=2)))[0] == 1


def test_what_is_none_of_its_business_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no use for StepRequested"):
        Arbiter().decide(0.0, StepRequested(1, 0))


class StaticMachine(ArbiterMachine):
    policy = "static"


class RoundRobinMachine(ArbiterMachine):
    policy = "round_robin"


class LeastRequestsMachine(ArbiterMachine):
    policy = "least_requests"


class KvMachine(ArbiterMachine):
    policy = "kv"


class LookaheadMachine(ArbiterMachine):
    policy = "kv_lookahead"


TestStatic = StaticMachine.TestCase
TestRoundRobin = RoundRobinMachine.TestCase
TestLeastRequests = LeastRequestsMachine.TestCase
TestKv = KvMachine.TestCase
TestLookahead = LookaheadMachine.TestCase
TestStatic.settings = settings(stateful_step_count=40)
TestRoundRobin.settings = TestStatic.settings
TestLeastRequests.settings = TestStatic.settings
TestKv.settings = TestStatic.settings
TestLookahead.settings = TestStatic.settings
