"""Trajectories and engines that do whatever the protocol allows, in any order, around one arbiter; what must always hold.

Two arbiters hear the same events: their answers agree byte for byte.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.codec import encode
from bus.messages import (
    AdmissionContinued,
    AnyMessage,
    CacheReleased,
    EngineJoined,
    EngineLeft,
    Envelope,
    LeaseDeferred,
    LeaseGranted,
    LeaseParked,
    LeaseReleased,
    LedgerReported,
    ProtocolError,
)
from policies.arbiter import Arbiter
from policies.decider import Send
from policies.lookahead import Lookahead
from policies.scheduling import PolicyName
from tests.policies.leases import load, request

RESPONSE = 960
CAPACITY = 1088  # the least: one trajectory with the longest prompt fits
PROMPTS = (8, 40, 128)
OVERTAKEN = 3
NAMES = ("a", "b", "c")  # of engines


@dataclass
class Life:
    """One trajectory as the rollout knows it."""

    group: int
    prompt: int
    tokens: int
    state: Literal["waiting", "running", "parked"] = "waiting"
    turn: int = 0
    lease: int = 0
    leased: int = 0  # tokens, by the books
    engine: str = ""  # where it has a cache, by the arbiter's messages


class ArbiterMachine(RuleBasedStateMachine):
    policy: ClassVar[PolicyName]

    def __init__(self) -> None:
        super().__init__()
        self.arbiter, self.twin = (Arbiter(self.policy, RESPONSE) for _ in range(2))
        if self.policy == "kv_lookahead":
            for each in (self.arbiter, self.twin):
                each.policy = Lookahead(each.ledger, each.expectations, overtaken=OVERTAKEN)
        self.now = 0.0
        self.lives: dict[int, Life] = {}
        self.engines: dict[str, EngineJoined] = {}
        self.engine_lives: Counter[str] = Counter()  # the last of each that began
        self.evicted: Counter[str] = Counter()
        self.continues = False
        self.begun: list[int] = []  # in the order of their first grants
        self.num_started = 0

    # ---------------------------------------------------------------- one event

    def decide(self, event: AnyMessage) -> None:
        self.now += 0.01
        effects = list(self.arbiter.decide(self.now, event))
        again = self.twin.decide(self.now, event)
        assert [frame(effect) for effect in effects] == [frame(effect) for effect in again]
        assert self.arbiter.state_after(event) == self.twin.state_after(event)
        for effect in effects:
            self._take(effect)

    def _take(self, effect: Send) -> None:
        match effect.message:
            case LeaseGranted() as grant:
                self._begin(grant)
            case CacheReleased(trajectory_id=tid, lease=lease):
                life = self.lives[tid]
                assert (life.engine, life.lease) == (effect.to, lease)
                assert life.state != "running"
                life.engine, life.leased = "", 0
            case AdmissionContinued():
                assert not self.continues
                self.continues = True
            case LedgerReported() as report:
                assert 0 <= report.usable_tokens <= self.engines[report.engine].kv_tokens
            case LeaseDeferred() as deferred:
                assert self.lives[deferred.trajectory_id].state == "waiting"
                assert deferred.reason
            case other:
                raise AssertionError(other)

    def _begin(self, grant: LeaseGranted) -> None:
        life = self.lives[grant.trajectory_id]
        assert life.state == "waiting"
        assert life.lease + 1 == grant.lease
        assert life.engine in ("", grant.engine)  # what it had elsewhere was given up before
        assert life.tokens < grant.tokens <= life.prompt + RESPONSE
        assert grant.life == self.engines[grant.engine].life
        assert grant.waited_s >= 0
        if life.lease == 0:
            self.begun.append(grant.trajectory_id)
        life.state, life.lease, life.leased, life.engine = "running", grant.lease, grant.tokens, grant.engine

    def _chosen(self, state: str, which: int) -> int:
        tids = [tid for tid, life in self.lives.items() if life.state == state]
        return tids[which % len(tids)]

    def _any(self, state: str) -> bool:
        return any(life.state == state for life in self.lives.values())

    def _ask(self, tid: int) -> None:
        life = self.lives[tid]
        if life.state != "waiting" and self.policy != "kv":
            life.leased = min(life.leased, life.tokens)
        life.state = "waiting"
        self.decide(
            request(
                tid,
                life.group,
                tokens=life.tokens,
                turn=life.turn,
                lease=life.lease + 1,
                prompt=life.prompt,
                response=RESPONSE,
            )
        )

    def _end(self, tid: int) -> None:
        tokens = self.lives.pop(tid).tokens
        self.decide(LeaseReleased(tid, tokens))

    # ---------------------------------------------------------------- engines

    @precondition(lambda self: len(self.engines) < 3)
    @rule(more=st.integers(0, 2000), page=st.sampled_from([1, 16, 64]))
    def an_engine_joins(self, more: int, page: int) -> None:
        self._join(next(name for name in NAMES if name not in self.engines), CAPACITY + more, page)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), more=st.integers(0, 2000))
    def an_engine_joins_for_its_next_life_before_the_word_that_it_left(self, which: int, more: int) -> None:
        known = list(self.engines.values())[which % len(self.engines)]
        self._lose(known.engine)
        self._join(known.engine, CAPACITY + more, known.page_tokens)

    def _join(self, name: str, tokens: int, page: int) -> None:
        self.engine_lives[name] += 1
        self.evicted[name] = 0
        joined = self.engines[name] = EngineJoined(name, tokens, page, 0, self.engine_lives[name])
        self.decide(joined)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2))
    def an_engine_leaves(self, which: int) -> None:
        name = list(self.engines)[which % len(self.engines)]
        del self.engines[name]
        self._lose(name)
        self.decide(EngineLeft(name, "gone", self.engine_lives[name]))

    @rule(name=st.sampled_from(NAMES))
    def an_engine_dies_before_the_word_that_it_joined(self, name: str) -> None:
        """And before the word that its last life is over, if that was still here."""
        self.engine_lives[name] += 1
        self.engines.pop(name, None)
        self._lose(name)
        self.decide(EngineLeft(name, "gone", self.engine_lives[name]))

    def _lose(self, name: str) -> None:
        for life in self.lives.values():
            if life.engine == name:
                life.engine, life.leased = "", 0

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), evicted=st.sampled_from([0, 0, 7]))
    def an_engine_reports(self, which: int, evicted: int) -> None:
        name = list(self.engines)[which % len(self.engines)]
        self.evicted[name] += evicted
        self.decide(load(name, evicted=self.evicted[name], life=self.engine_lives[name]))

    # ---------------------------------------------------------------- trajectories

    @rule(size=st.integers(1, 5), prompt=st.sampled_from(PROMPTS))
    def a_group_starts(self, size: int, prompt: int) -> None:
        group = self.num_started
        for tid in range(self.num_started, self.num_started + size):
            self.lives[tid] = Life(group, prompt, prompt)
            self.num_started += 1
            self._ask(tid)

    @precondition(lambda self: self._any("running"))
    @rule(
        which=st.integers(0, 99), share=st.sampled_from([0.02, 0.1, 1.0]), then=st.sampled_from(["call", "end", "bad"])
    )
    def a_turn_ends(self, which: int, share: float, then: str) -> None:
        tid = self._chosen("running", which)
        life = self.lives[tid]
        limit = life.prompt + RESPONSE
        most = life.leased or limit  # what its engine had generated before it left may arrive yet
        life.tokens += max(1, int(share * (most - life.tokens)))
        if then == "end" or life.tokens >= limit:
            self._end(tid)
        elif then == "call":
            life.state = "parked"
            if self.policy != "kv":
                life.leased = min(life.leased, life.tokens)
            self.decide(LeaseParked(tid, life.tokens))
        else:  # a call that does not parse is answered at once
            life.turn += 1
            life.tokens = min(life.tokens + 5, limit - 1)
            self._ask(tid)

    @precondition(lambda self: self._any("running"))
    @rule(which=st.integers(0, 99))
    def a_lease_ends_within_a_turn(self, which: int) -> None:
        tid = self._chosen("running", which)
        life = self.lives[tid]
        life.tokens = max(life.tokens, life.leased)
        if life.tokens >= life.prompt + RESPONSE:
            self._end(tid)
        else:
            self._ask(tid)

    @precondition(lambda self: self._any("running"))
    @rule(which=st.integers(0, 99))
    def a_turn_fails(self, which: int) -> None:
        self._ask(self._chosen("running", which))

    @precondition(lambda self: self._any("parked"))
    @rule(which=st.integers(0, 99), result_tokens=st.sampled_from([1, 30, 5000]))
    def a_tool_answers(self, which: int, result_tokens: int) -> None:
        tid = self._chosen("parked", which)
        life = self.lives[tid]
        life.turn += 1
        if life.tokens + result_tokens >= life.prompt + RESPONSE:
            self._end(tid)
        else:
            life.tokens += result_tokens
            self._ask(tid)

    @precondition(lambda self: self._any("waiting"))
    @rule(which=st.integers(0, 99))
    def one_that_waits_is_given_up(self, which: int) -> None:
        self._end(self._chosen("waiting", which))

    @precondition(lambda self: self.continues)
    @rule()
    def the_arbiter_goes_on(self) -> None:
        self.continues = False
        self.decide(AdmissionContinued())

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.lives)
    @rule(which=st.integers(0, 99), kind=st.integers(0, 5))
    def a_forbidden_event_changes_nothing(self, which: int, kind: int) -> None:
        tid = list(self.lives)[which % len(self.lives)]
        life = self.lives[tid]
        again = request(
            tid,
            life.group,
            tokens=life.tokens,
            turn=life.turn,
            lease=max(1, life.lease),
            prompt=life.prompt,
            response=RESPONSE,
        )
        parked_again = LeaseParked(tid, life.tokens - (life.state == "running"))
        forbidden = (
            again,
            parked_again,
            LeaseReleased(tid, life.tokens - 1),
            LeaseReleased(999_999, 1),
            EngineJoined("a", 5, 64, 0, 99),
            load("nobody"),
        )[kind]
        self._refuse(forbidden)

    @rule(name=st.sampled_from(NAMES), earlier=st.integers(0, 2), kind=st.integers(0, 2))
    def what_is_of_an_earlier_life_changes_nothing(self, name: str, earlier: int, kind: int) -> None:
        """Nor what is of this life and comes twice; of a report, what is of any life that is not here."""
        last = self.engine_lives[name]
        life = last - earlier
        is_here = name in self.engines and life == last
        match kind:
            case 0:
                self._refuse(EngineJoined(name, CAPACITY, 1, 0, life))
            case 1 if not is_here:
                self._refuse(EngineLeft(name, "gone", life))
            case 2 if not is_here:
                self._refuse(load(name, evicted=99, life=life))
            case _:
                pass

    def _refuse(self, event: AnyMessage) -> None:
        before = self._books()
        with pytest.raises(ProtocolError):
            self.arbiter.decide(self.now, event)
        assert self._books() == before

    def _books(self) -> object:
        ledger = self.arbiter.ledger
        holdings = [
            (each.trajectory_id, each.state, each.tokens, each.pages, each.leases, each.since, each.request)
            for each in ledger.holdings.values()
        ]
        engines = [
            (
                each.name,
                each.life,
                each.leased_pages,
                each.usable_pages,
                each.running,
                list(each.holdings),
                list(each.parked),
            )
            for each in ledger.engines.values()
        ]
        return holdings, engines, dict(ledger.groups)

    # ---------------------------------------------------------------- what always holds

    @invariant()
    def leases_are_conserved_and_a_shared_prompt_is_counted_once(self) -> None:
        for name, joined in self.engines.items():
            engine, page = self.arbiter.ledger.engines[name], joined.page_tokens
            here = [life for life in self.lives.values() if life.engine == name]
            shared = {life.group: life.prompt // page for life in here}
            own = sum(-(-life.leased // page) - life.prompt // page for life in here)
            assert engine.leased_pages == own + sum(shared.values())
            assert engine.running == sum(life.state == "running" for life in here)
            assert len(engine.parked) == sum(life.state == "parked" for life in here)
        assert set(self.arbiter.ledger.holdings) == set(self.lives)

    @invariant()
    def capacity_is_never_oversold(self) -> None:
        if self.policy in ("kv", "kv_lookahead"):
            for engine in self.arbiter.ledger.engines.values():
                assert engine.leased_pages <= engine.pages

    @invariant()
    def nobody_waits_while_nothing_is_done(self) -> None:
        if self.engines and not self.continues and not self._any("running") and not self._any("parked"):
            assert not self.lives, self.lives

    @invariant()
    def no_new_one_is_overtaken_by_more_than_the_bound(self) -> None:
        """Trajectories are numbered as they came."""
        bound = OVERTAKEN if self.policy == "kv_lookahead" else 0
        new = [tid for tid, life in self.lives.items() if life.lease == 0]
        for tid in [*new, *self.begun]:
            before = self.begun[: self.begun.index(tid)] if tid in self.begun else self.begun
            assert sum(other > tid for other in before) <= bound

    def teardown(self) -> None:
        """Whoever runs uses up all that it may get, and everybody is served in the end."""
        if not self.engines:
            self.an_engine_joins(0, 16)
        for _ in range(200 * (1 + len(self.lives))):
            if not self.lives:
                break
            if self.continues:
                self.the_arbiter_goes_on()
            elif self._any("running"):
                self.a_lease_ends_within_a_turn(0)
            elif self._any("parked"):
                self.a_tool_answers(0, 1)
            self.nobody_waits_while_nothing_is_done()
            self.leases_are_conserved_and_a_shared_prompt_is_counted_once()
            self.capacity_is_never_oversold()
        assert not self.lives, self.lives
        assert not self.arbiter.ledger.groups
        assert all(engine.leased_pages == 0 for engine in self.arbiter.ledger.engines.values())


def frame(effect: Send) -> bytes:
    return encode(Envelope("head/arbiter", effect.to, effect.message))
