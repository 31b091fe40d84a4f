"""The ledger counts whole pages, counts a shared prompt once, and leases only usable pages."""

from collections.abc import Callable

import pytest

from asterism.bus.messages import EngineLeft, LeaseRequested, ProtocolError
from asterism.policies.arbiter.kv_ledger import EngineAccount, KvAccount, Ledger
from tests.policies.arbiter.leases import PROMPT, RESPONSE, joined, load, request, snapshot


def make_ledger(tokens: int = 64, page: int = 1) -> tuple[Ledger, EngineAccount]:
    ledger = Ledger()
    ledger.add_engine(joined(0, tokens, page))
    return ledger, ledger.engines["generator-0"]


def lease(ledger: Ledger, event: LeaseRequested, tokens: int) -> KvAccount:
    """Lease tokens on the first engine."""
    holding = ledger.enqueue_request(event, "rollout-0", 0.0)
    ledger.grant_lease(holding, next(iter(ledger.engines.values())), tokens)
    return holding


def test_a_lease_beyond_the_free_pages_is_refused_unless_the_policy_oversells() -> None:
    ledger, engine = make_ledger(30)
    lease(ledger, request(1), 20)
    holding = ledger.enqueue_request(request(2), "rollout-0", 0.0)
    with pytest.raises(ProtocolError, match="10 free pages, not 11"):
        ledger.grant_lease(holding, engine, 11)
    assert (engine.leased_pages, holding.state) == (20, "waiting")
    ledger.grant_lease(holding, engine, 11, oversell=True)
    assert engine.leased_pages == 31


def test_older_reports_are_refused() -> None:
    _, engine = make_ledger(1000)
    engine.apply_report(load(decode_steps=10, evicted_tokens=0))
    engine.apply_report(load(decode_steps=20, evicted_tokens=5))
    with pytest.raises(ProtocolError, match="reports lower counters than before"):
        engine.apply_report(load(decode_steps=10, evicted_tokens=0))
    engine.apply_report(load(decode_steps=30, evicted_tokens=5))
    assert engine.usable_pages == 960  # the repeated report of the eviction reduces no further pages


def test_requests_of_ended_trajectories_are_refused() -> None:
    ledger, engine = make_ledger(64)
    lease(ledger, request(1), 20)
    ledger.close_account(1, 20)
    with pytest.raises(ProtocolError, match="trajectory 1 has ended"):
        ledger.enqueue_request(request(1), "rollout-0", 0.0)
    assert not ledger.accounts and not ledger.groups
    lease(ledger, request(1 + 65_536), 20)
    assert engine.running == 1


def test_a_lease_extension_within_a_turn_is_distinguished_from_a_new_turn() -> None:
    ledger, engine = make_ledger(64)
    holding = lease(ledger, request(1), 20)
    ledger.enqueue_request(request(1, tokens=20, lease=2), "rollout-0", 0.0)
    assert holding.is_extension
    ledger.grant_lease(holding, engine, 30)
    ledger.enqueue_request(request(1, tokens=30, turn=1, lease=3), "rollout-0", 0.0)
    assert not holding.is_extension


def test_the_usable_capacity_shrinks_on_evictions_and_recovers_slowly() -> None:
    _, engine = make_ledger(1000)
    engine.apply_report(load())
    engine.apply_report(load(evicted_tokens=5))
    assert engine.usable_pages == 950
    engine.apply_report(load(evicted_tokens=5, preempted=1))
    assert engine.usable_pages == 902
    for _ in range(5):
        engine.apply_report(load(evicted_tokens=5, preempted=1))
    assert 902 < engine.usable_pages < 1000
    for _ in range(20):
        engine.apply_report(load(evicted_tokens=5, preempted=1))
    assert engine.usable_pages == 1000


def test_the_time_of_a_decode_step_is_measured_between_two_reports() -> None:
    _, engine = make_ledger()
    engine.apply_report(load(decode_steps=10, busy_s=1.0))
    engine.apply_report(load(decode_steps=20, busy_s=1.5))
    engine.apply_report(load(decode_steps=20, busy_s=1.9))
    assert engine.step_s == pytest.approx(0.05)


def test_the_only_account_of_an_engine_can_use_all_announced_pages() -> None:
    ledger, engine = make_ledger(64)
    engine.apply_report(load())
    engine.apply_report(load(evicted_tokens=1))
    assert engine.usable_pages == 60
    alone = ledger.enqueue_request(request(1), "rollout-0", 0.0)
    assert engine.count_free_pages_for(alone) == 64
    ledger.grant_lease(alone, engine, 64)
    assert engine.count_free_pages_for(ledger.enqueue_request(request(2), "rollout-0", 0.0)) == 0


WAITING, RUNNING, PARKED = 1, 2, 3


def ask(tid: int, group: int | None = None, **fields: int) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.enqueue_request(request(tid, group, **fields), "rollout-0", 0.0)


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda ledger: ledger.add_engine(joined(1, tokens=3, page=4)), "less than one page"),
        (lambda ledger: ledger.add_engine(joined(0, page=0)), "less than one page"),
        (lambda ledger: ledger.remove_engine(EngineLeft("generator-0", "gone", 0)), "had already left"),
        (ask(9, tokens=PROMPT + RESPONSE), "requests 0 KV tokens"),
        (ask(9, tokens=7), "after 7"),
        (ask(9, lease=2), "new trajectory 9 requests lease 2"),
        (ask(9, group=7, prompt=9, tokens=9), "expected lease 1 and 8 tokens"),
        (ask(WAITING, 7, lease=1), "requested KV tokens twice"),
        (ask(RUNNING, 7, tokens=9, lease=1), "requests lease 1 after lease 1"),
        (ask(RUNNING, 7, tokens=9, lease=3), "requests lease 3 after lease 1"),
        (ask(RUNNING, 8, tokens=9, lease=2), "changed its group"),
        (ask(RUNNING, 7, turn=-1, tokens=9, lease=2), "requests an earlier turn"),
        (ask(PARKED, 7, tokens=8, lease=2), "8 tokens, fewer than the 12 before"),
        (ask(RUNNING, 7, tokens=9, lease=2, response=RESPONSE + 1), "exceeds its first limit"),
        (lambda ledger: ledger.mark_idle(WAITING, 8), "no running lease"),
        (lambda ledger: ledger.mark_idle(PARKED, 12), "no running lease"),
        (lambda ledger: ledger.mark_idle(RUNNING, 13), "13 tokens, but 12 were leased"),
        (lambda ledger: ledger.mark_idle(RUNNING, 7), "7 tokens, fewer than the 8 before"),
        (lambda ledger: ledger.close_account(9, 8), "holds no lease"),
        (lambda ledger: ledger.close_account(PARKED, 8), "8 tokens, fewer than the 12 before"),
    ],
)
def test_invalid_events_raise_and_change_nothing(act: Callable[[Ledger], object], match: str) -> None:
    ledger, _ = make_ledger()
    lease(ledger, request(RUNNING, 7), 12)
    lease(ledger, request(PARKED, 7), 12)
    ledger.mark_idle(PARKED, 12)
    ledger.enqueue_request(request(WAITING, 7), "rollout-0", 0.0)
    before = snapshot(ledger)
    with pytest.raises(ProtocolError, match=match):
        act(ledger)
    assert snapshot(ledger) == before
