"""Leases on KV tokens: never oversold, conserved, first come first served."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.messages import BufferCursor as Cursor
from bus.messages import (
    EngineJoined,
    EngineLeft,
    LeaseGranted,
    LeaseReleased,
    LeaseRequested,
    ProtocolError,
    RunStarted,
)
from policies.arbiter import Arbiter
from policies.decider import Send


def granted(effects: list[Send]) -> list[int]:
    return [effect.message.trajectory_id for effect in effects if isinstance(effect.message, LeaseGranted)]


def arbiter_with(*capacities: int, page: int = 1) -> Arbiter:
    arbiter = Arbiter()
    for number, tokens in enumerate(capacities):
        arbiter.decide(0.0, EngineJoined(f"generator-{number}", tokens, page, 0))
    return arbiter


def test_a_lease_is_granted_at_once_where_there_is_room() -> None:
    (effect,) = arbiter_with(100).decide(0.0, LeaseRequested(1, 60))
    assert effect == Send("rollout-0", LeaseGranted(1, "generator-0", 60))


def test_a_request_goes_to_the_engine_with_the_most_room() -> None:
    arbiter = arbiter_with(100, 150)
    engines = [arbiter.decide(0.0, LeaseRequested(tid, 60))[0].message.engine for tid in range(3)]  # pyright: ignore
    assert engines == ["generator-1", "generator-0", "generator-1"]


def test_a_lease_is_rounded_up_to_whole_pages() -> None:
    arbiter = arbiter_with(128, page=64)
    assert granted(list(arbiter.decide(0.0, LeaseRequested(1, 65)))) == [1]
    assert granted(list(arbiter.decide(0.0, LeaseRequested(2, 1)))) == []


def test_a_small_request_never_overtakes_a_large_one_that_waits() -> None:
    arbiter = arbiter_with(100)
    arbiter.decide(0.0, LeaseRequested(1, 60))
    assert granted(list(arbiter.decide(0.0, LeaseRequested(2, 80)))) == []
    assert granted(list(arbiter.decide(0.0, LeaseRequested(3, 10)))) == []
    assert granted(list(arbiter.decide(0.0, LeaseReleased(1)))) == [2, 3]


def test_requests_wait_for_the_first_engine_to_join() -> None:
    arbiter = Arbiter()
    assert not arbiter.decide(0.0, LeaseRequested(1, 10))
    assert granted(list(arbiter.decide(0.0, EngineJoined("generator-0", 100, 1, 0)))) == [1]


def test_a_request_that_is_withdrawn_lets_those_behind_it_pass() -> None:
    arbiter = arbiter_with(100)
    arbiter.decide(0.0, LeaseRequested(1, 200))
    arbiter.decide(0.0, LeaseRequested(2, 10))
    assert granted(list(arbiter.decide(0.0, LeaseReleased(1)))) == [2]


def test_a_run_that_starts_anew_owes_nobody_and_waits_for_engines_to_join() -> None:
    arbiter = arbiter_with(100)
    arbiter.decide(0.0, LeaseRequested(1, 100))
    arbiter.decide(0.0, RunStarted(0, Cursor()))
    arbiter.decide(0.0, EngineJoined("generator-0", 100, 1, 0))
    assert granted(list(arbiter.decide(0.0, LeaseRequested(1, 100)))) == [1]


@pytest.mark.parametrize(
    "event",
    [
        LeaseReleased(9),
        EngineLeft("generator-7", "died"),
        LeaseRequested(1, 5),
        LeaseRequested(5, 0),
        EngineJoined("g", 1, 2, 0),
    ],
)
def test_a_forbidden_event_raises_and_changes_nothing(event: LeaseReleased) -> None:
    arbiter = arbiter_with(100)
    arbiter.decide(0.0, LeaseRequested(1, 10))
    before = arbiter.state_after(event)
    with pytest.raises(ProtocolError):
        arbiter.decide(0.0, event)
    assert arbiter.state_after(event) == before


class ArbiterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter()
        self.next_id = 0
        self.waiting: list[int] = []  # in the order of asking
        self.held: dict[int, int] = {}

    def _decide(self, event: LeaseRequested | LeaseReleased | EngineJoined) -> None:
        for effect in self.arbiter.decide(0.0, event):
            message = effect.message
            assert isinstance(message, LeaseGranted)
            assert self.waiting.pop(0) == message.trajectory_id  # first come, first served
            self.held[message.trajectory_id] = message.tokens

    @rule(tokens=st.integers(10, 200), page=st.integers(1, 10))
    def join(self, tokens: int, page: int) -> None:
        self._decide(EngineJoined(f"generator-{len(self.arbiter.ledger.engines)}", tokens, page, 0))

    @rule(tokens=st.integers(1, 100))
    def request(self, tokens: int) -> None:
        self.waiting.append(self.next_id)
        self.next_id += 1
        self._decide(LeaseRequested(self.next_id - 1, tokens))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        tid = sorted(self.held)[which % len(self.held)]
        del self.held[tid]
        self._decide(LeaseReleased(tid))

    @invariant()
    def capacity_is_never_oversold_and_leases_are_conserved(self) -> None:
        for engine in self.arbiter.ledger.engines.values():
            assert 0 <= engine.leased_tokens <= engine.kv_tokens
            assert engine.leased_tokens % engine.page_tokens == 0
        leased = sum(engine.leased_tokens for engine in self.arbiter.ledger.engines.values())
        assert leased == sum(self.held.values())


TestArbiterMachine = ArbiterMachine.TestCase
TestArbiterMachine.settings = settings(stateful_step_count=40)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_everybody_is_served_in_the_end(sizes: list[int]) -> None:
    arbiter = arbiter_with(64)
    live: list[int] = []
    for tid, tokens in enumerate(sizes):
        live += granted(list(arbiter.decide(0.0, LeaseRequested(tid, tokens))))
    served = list(live)
    while live:
        new = granted(list(arbiter.decide(0.0, LeaseReleased(live.pop(0)))))
        live += new
        served += new
    assert served == list(range(len(sizes)))
