"""The arbiter's books: whole pages, a group's prompt once, nothing beyond what an engine is trusted to have."""

from __future__ import annotations

import pytest

from bus.messages import EngineLeft, LeaseRequested, ProtocolError
from policies.ledger import Engine, Holding, Ledger
from tests.policies.leases import PROMPT, RESPONSE, joined, load, request


def ledger_with(tokens: int = 64, page: int = 1, *, shrinks: bool = True) -> tuple[Ledger, Engine]:
    ledger = Ledger(shrinks=shrinks)
    ledger.join(joined(0, tokens, page))
    return ledger, ledger.engines["generator-0"]


def lease(ledger: Ledger, event: LeaseRequested, tokens: int) -> Holding:
    """On the first engine."""
    holding = ledger.request(event, "rollout-0", 0.0)
    ledger.lease(holding, next(iter(ledger.engines.values())), tokens)
    return holding


def test_a_lease_takes_whole_pages() -> None:
    ledger, engine = ledger_with(64, page=16)
    lease(ledger, request(1), 17)
    assert (engine.leased_pages, engine.free_pages, engine.running) == (2, 2, 1)


def test_the_pages_of_a_shared_prompt_are_counted_once_as_long_as_a_member_is_there() -> None:
    ledger, engine = ledger_with(64, page=4)
    for tid in (1, 2, 3):
        lease(ledger, request(tid, group=5), 12)
    assert engine.leased_pages == 2 + 3 * 1
    ledger.release(1, 12)
    ledger.release(2, 12)
    assert engine.leased_pages == 2 + 1
    ledger.release(3, 12)
    assert engine.leased_pages == 0


def test_the_page_in_which_a_prompt_ends_is_each_members_own() -> None:
    ledger, engine = ledger_with(64, page=16)
    lease(ledger, request(1, group=5), 16)  # a prompt of 8: no whole page to share
    lease(ledger, request(2, group=5), 16)
    assert engine.leased_pages == 2


def test_a_lease_beyond_what_is_free_is_forbidden_unless_the_policy_oversells() -> None:
    ledger, engine = ledger_with(30)
    lease(ledger, request(1), 20)
    holding = ledger.request(request(2), "rollout-0", 0.0)
    with pytest.raises(ProtocolError, match="10 free pages, not 11"):
        ledger.lease(holding, engine, 11)
    assert (engine.leased_pages, holding.state) == (20, "waiting")
    ledger.lease(holding, engine, 11, oversell=True)
    assert engine.leased_pages == 31


def test_parking_shrinks_a_lease_to_what_is_cached_and_a_request_keeps_that() -> None:
    ledger, engine = ledger_with(64)
    lease(ledger, request(1), 40)
    ledger.park(1, 20)
    assert (engine.leased_pages, engine.running, list(engine.parked)) == (20, 0, [1])
    holding = ledger.request(request(1, tokens=25, turn=1, lease=2), "rollout-0", 0.0)
    assert (engine.leased_pages, holding.leased_tokens, list(engine.parked)) == (20, 20, [])
    ledger.lease(holding, engine, 30)
    assert engine.leased_pages == 30


def test_a_lease_of_the_worst_case_is_kept_while_a_tool_works() -> None:
    ledger, engine = ledger_with(64, shrinks=False)
    lease(ledger, request(1), PROMPT + RESPONSE)
    ledger.park(1, 20)
    ledger.request(request(1, tokens=25, turn=1, lease=2), "rollout-0", 0.0)
    assert engine.leased_pages == 64


def test_a_trajectory_that_moves_gives_up_what_it_had() -> None:
    ledger, first = ledger_with(64)
    ledger.join(joined(1))
    lease(ledger, request(1), 40)
    ledger.park(1, 40)
    holding = ledger.request(request(1, tokens=41, turn=1, lease=2), "rollout-0", 0.0)
    ledger.lease(holding, ledger.engines["generator-1"], 50)
    assert (first.leased_pages, first.running, ledger.engines["generator-1"].leased_pages) == (0, 0, 50)


def test_what_lay_on_an_engine_that_leaves_is_lost_and_its_trajectories_are_not() -> None:
    ledger, _ = ledger_with(64)
    running = lease(ledger, request(1), 20)
    assert ledger.leave(EngineLeft("generator-0", "gone")) == [running]
    assert (running.engine, running.pages, running.state) == (None, 0, "running")
    ledger.request(request(1, tokens=12, lease=2), "rollout-0", 0.0)
    assert running.state == "waiting"


def test_an_engine_that_joins_again_has_lost_its_cache() -> None:
    ledger, _ = ledger_with(64)
    lost = lease(ledger, request(1), 20)
    assert ledger.join(joined(0, 32, life=2)) == [lost]
    assert (ledger.engines["generator-0"].leased_pages, ledger.engines["generator-0"].pages) == (0, 32)


def test_of_an_engines_lives_only_a_later_one_joins_and_only_the_present_one_or_a_later_one_leaves() -> None:
    ledger, _ = ledger_with(64)
    kept = lease(ledger, request(1), 20)
    with pytest.raises(ProtocolError, match="joins for life 1, life 1 is known"):
        ledger.join(joined())
    assert kept.engine is ledger.engines["generator-0"]
    ledger.join(joined(life=3))
    for life in (1, 2):
        with pytest.raises(ProtocolError, match=f"life {life} of generator-0 was over before"):
            ledger.leave(EngineLeft("generator-0", "gone", life))
    assert "generator-0" in ledger.engines
    ledger.leave(EngineLeft("generator-0", "gone", 4))  # that it had joined is still on its way
    for life in (3, 4):
        with pytest.raises(ProtocolError, match="life 4 is known"):
            ledger.join(joined(life=life))
    with pytest.raises(ProtocolError, match="life 4 of generator-0 was over before"):
        ledger.leave(EngineLeft("generator-0", "gone", 4))
    assert not ledger.engines


def test_an_engine_that_leaves_before_it_has_joined_never_does() -> None:
    ledger = Ledger()
    assert ledger.leave(EngineLeft("generator-0", "gone")) == []
    with pytest.raises(ProtocolError, match="life 1 is known"):
        ledger.join(joined())
    ledger.join(joined(life=2))
    assert list(ledger.engines) == ["generator-0"]


def test_a_report_of_another_life_or_from_before_the_last_one_is_refused() -> None:
    ledger, engine = ledger_with(1000)
    for life in (0, 2):
        with pytest.raises(ProtocolError, match="is not here"):
            ledger.reporting(load(life=life))
    assert ledger.reporting(load()) is engine
    engine.note(load(steps=10, evicted=0))
    engine.note(load(steps=20, evicted=5))
    with pytest.raises(ProtocolError, match="reports less than it did before"):
        engine.note(load(steps=10, evicted=0))
    engine.note(load(steps=30, evicted=5))
    assert engine.usable_pages == 960  # the same eviction counts once


def test_a_turn_that_its_lease_has_ended_is_told_from_one_that_begins() -> None:
    ledger, engine = ledger_with(64)
    holding = lease(ledger, request(1), 20)
    ledger.request(request(1, tokens=20, lease=2), "rollout-0", 0.0)
    assert holding.is_extension
    ledger.lease(holding, engine, 30)
    ledger.request(request(1, tokens=30, turn=1, lease=3), "rollout-0", 0.0)
    assert not holding.is_extension


def test_an_engine_that_evicts_or_preempts_is_treated_as_smaller_until_it_has_stopped_for_long() -> None:
    _, engine = ledger_with(1000)
    engine.note(load())
    engine.note(load(evicted=5))
    assert engine.usable_pages == 950
    engine.note(load(evicted=5, preempted=1))
    assert engine.usable_pages == 902
    for _ in range(5):
        engine.note(load(evicted=5, preempted=1))
    assert 902 < engine.usable_pages < 1000
    for _ in range(20):
        engine.note(load(evicted=5, preempted=1))
    assert engine.usable_pages == 1000


def test_the_time_of_a_decode_step_is_measured_between_two_reports() -> None:
    _, engine = ledger_with()
    engine.note(load(steps=10, busy_s=1.0))
    engine.note(load(steps=20, busy_s=1.5))
    engine.note(load(steps=20, busy_s=1.9))
    assert engine.step_s == pytest.approx(0.05)


def test_the_time_of_a_decode_step_is_a_mean_in_which_later_reports_weigh_more() -> None:
    _, engine = ledger_with()
    for steps, busy_s in ((0, 0.0), (10, 0.5), (20, 2.5)):
        engine.note(load(steps=steps, busy_s=busy_s))
    assert engine.step_s == pytest.approx((0.95 * 0.5 + 2.0) / (0.95 * 10 + 10))
    for report in range(200):
        engine.note(load(steps=30 + 10 * report, busy_s=4.5 + 2.0 * report))
    assert engine.step_s == pytest.approx(0.2, rel=1e-3)


def test_who_is_alone_on_an_engine_may_have_all_of_it() -> None:
    ledger, engine = ledger_with(64)
    engine.note(load())
    engine.note(load(evicted=1))
    assert engine.usable_pages == 60
    alone = ledger.request(request(1), "rollout-0", 0.0)
    assert engine.room(alone) == 64
    ledger.lease(alone, engine, 64)
    assert engine.room(ledger.request(request(2), "rollout-0", 0.0)) == 0


WAITING, RUNNING, PARKED = 1, 2, 3


@pytest.mark.parametrize(
    ("act", "match"),
    [
        (lambda ledger: ledger.join(joined(1, tokens=3, page=4)), "no whole page"),
        (lambda ledger: ledger.join(joined(0, page=0)), "no whole page"),
        (lambda ledger: ledger.leave(EngineLeft("generator-0", "gone", 0)), "was over before"),
        (lambda ledger: ledger.request(request(9, tokens=PROMPT + RESPONSE), "r", 0.0), "asks for 0 KV tokens"),
        (lambda ledger: ledger.request(request(9, tokens=7), "r", 0.0), "behind 7"),
        (lambda ledger: ledger.request(request(9, lease=2), "r", 0.0), "is new, and asks for lease 2"),
        (lambda ledger: ledger.request(request(9, group=7, prompt=9, tokens=9), "r", 0.0), "its group's has 8"),
        (lambda ledger: ledger.request(request(WAITING, 7, lease=1), "r", 0.0), "asked twice"),
        (lambda ledger: ledger.request(request(RUNNING, 7, tokens=9, lease=1), "r", 0.0), "asks for lease 1 after 1"),
        (lambda ledger: ledger.request(request(RUNNING, 7, tokens=9, lease=3), "r", 0.0), "asks for lease 3 after 1"),
        (lambda ledger: ledger.request(request(RUNNING, 8, tokens=9, lease=2), "r", 0.0), "changed its group"),
        (lambda ledger: ledger.request(request(RUNNING, 7, turn=-1, tokens=9, lease=2), "r", 0.0), "goes back"),
        (lambda ledger: ledger.request(request(PARKED, 7, tokens=8, lease=2), "r", 0.0), "8 tokens after 12"),
        (
            lambda ledger: ledger.request(LeaseRequested(RUNNING, 7, 0, 2, 9, PROMPT, RESPONSE), "r", 0.0),
            "beyond the limit",
        ),
        (lambda ledger: ledger.park(WAITING, 8), "no lease to generate"),
        (lambda ledger: ledger.park(PARKED, 12), "no lease to generate"),
        (lambda ledger: ledger.park(RUNNING, 13), "13 tokens, 12 were leased"),
        (lambda ledger: ledger.park(RUNNING, 7), "7 tokens after 8"),
        (lambda ledger: ledger.release(9, 8), "holds no lease"),
        (lambda ledger: ledger.release(PARKED, 8), "8 tokens after 12"),
    ],
)
def test_what_cannot_be_raises_and_changes_nothing(act: object, match: str) -> None:
    ledger, engine = ledger_with()
    lease(ledger, request(RUNNING, 7), 12)
    lease(ledger, request(PARKED, 7), 12)
    ledger.park(PARKED, 12)
    ledger.request(request(WAITING, 7), "rollout-0", 0.0)

    def books() -> object:
        holdings = [(each.state, each.tokens, each.pages, each.leases) for each in ledger.holdings.values()]
        return (
            holdings,
            dict(ledger.groups),
            set(ledger.engines),
            engine.leased_pages,
            engine.running,
            dict(engine.groups),
        )

    before = books()
    with pytest.raises(ProtocolError, match=match):
        act(ledger)  # pyright: ignore[reportCallIssue, reportUnknownVariableType]
    assert books() == before
