"""A state machine of trajectories and engines around one arbiter, with its invariants.

A second arbiter receives the same events and must send the same bytes.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asterism.bus import messages as msg
from asterism.bus.codec import encode
from asterism.policies.arbiter.arbiter import Arbiter, PolicyName
from asterism.policies.arbiter.kv_lookahead import LookaheadPolicy
from asterism.policies.decider import Send
from tests.policies.arbiter.leases import load, request, snapshot

RESPONSE = 960
CAPACITY = 1088  # tokens of the smallest engine: the longest prompt and its response
PROMPTS = (8, 40, 128)
MAX_OVERTAKES = 3
NAMES = ("a", "b", "c")  # engine names


@dataclass
class LiveTrajectory:
    """One trajectory in the view of the rollout process."""

    group: int
    prompt: int
    tokens: int
    state: Literal["waiting", "running", "parked"] = "waiting"
    turn: int = 0
    lease: int = 0
    leased: int = 0  # leased tokens in the ledger
    engine: str = ""  # engine with the cache, according to the arbiter's messages


class ArbiterMachine(RuleBasedStateMachine):
    policy: ClassVar[PolicyName]

    def __init__(self) -> None:
        super().__init__()
        self.arbiter, self.twin = (Arbiter(self.policy, RESPONSE) for _ in range(2))
        if self.policy == "kv_lookahead":
            for each in (self.arbiter, self.twin):
                each.policy = LookaheadPolicy(each.ledger, each.length_forecast, max_overtakes=MAX_OVERTAKES)
        self.now = 0.0
        self.trajectories: dict[int, LiveTrajectory] = {}
        self.engines: dict[str, msg.EngineJoined] = {}
        self.incarnations: Counter[str] = Counter()  # last incarnation of each engine
        self.evicted: Counter[str] = Counter()
        self.continuation_sent = False
        self.started: list[int] = []  # trajectory ids in the order of their first grants
        self.num_started = 0

    # ---------------------------------------------------------------- one event

    def decide(self, event: msg.AnyMessage) -> None:
        self.now += 0.01
        effects = list(self.arbiter.decide(self.now, event))
        repeated = self.twin.decide(self.now, event)
        assert [frame(effect) for effect in effects] == [frame(effect) for effect in repeated]
        assert self.arbiter.get_state_after(event) == self.twin.get_state_after(event)
        for effect in effects:
            self._apply(effect)

    def _apply(self, effect: Send) -> None:
        match effect.message:
            case msg.LeaseGranted() as grant:
                self._on_granted(grant)
            case msg.CacheReleased(trajectory_id=tid, lease=lease):
                trajectory = self.trajectories[tid]
                assert (trajectory.engine, trajectory.lease) == (effect.to, lease)
                assert trajectory.state != "running"
                trajectory.engine, trajectory.leased = "", 0
            case msg.AdmissionContinued():
                assert not self.continuation_sent
                self.continuation_sent = True
            case msg.LedgerReported() as report:
                assert 0 <= report.usable_tokens <= self.engines[report.engine].kv_tokens
            case msg.LeaseDeferred() as deferred:
                assert self.trajectories[deferred.trajectory_id].state == "waiting"
                assert deferred.reason
            case other:
                raise AssertionError(other)

    def _on_granted(self, grant: msg.LeaseGranted) -> None:
        trajectory = self.trajectories[grant.trajectory_id]
        assert trajectory.state == "waiting"
        assert trajectory.lease + 1 == grant.lease
        assert trajectory.engine in ("", grant.engine)  # the trajectory has no pages on another engine
        assert trajectory.tokens < grant.tokens <= trajectory.prompt + RESPONSE
        assert grant.incarnation == self.engines[grant.engine].incarnation
        assert grant.waited_s >= 0
        if trajectory.lease == 0:
            self.started.append(grant.trajectory_id)
        trajectory.state, trajectory.engine = "running", grant.engine
        trajectory.lease, trajectory.leased = grant.lease, grant.tokens

    def _choose(self, state: str, which: int) -> int:
        tids = [tid for tid, trajectory in self.trajectories.items() if trajectory.state == state]
        return tids[which % len(tids)]

    def _has_any(self, state: str) -> bool:
        return any(trajectory.state == state for trajectory in self.trajectories.values())

    def _request_lease(self, tid: int) -> None:
        trajectory = self.trajectories[tid]
        if trajectory.state != "waiting" and self.policy != "worst_case":
            trajectory.leased = min(trajectory.leased, trajectory.tokens)
        trajectory.state = "waiting"
        self.decide(self._build_request(tid, trajectory.lease + 1))

    def _build_request(self, tid: int, lease: int) -> msg.LeaseRequested:
        each = self.trajectories[tid]
        sizes = {"tokens": each.tokens, "prompt": each.prompt, "response": RESPONSE}
        return request(tid, each.group, turn=each.turn, lease=lease, **sizes)

    def _end(self, tid: int) -> None:
        tokens = self.trajectories.pop(tid).tokens
        self.decide(msg.LeaseReleased(tid, tokens))

    # ---------------------------------------------------------------- engines

    @precondition(lambda self: len(self.engines) < 3)
    @rule(more=st.integers(0, 2000), page=st.sampled_from([1, 16, 64]))
    def an_engine_joins(self, more: int, page: int) -> None:
        self._add_engine(next(name for name in NAMES if name not in self.engines), CAPACITY + more, page)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), more=st.integers(0, 2000))
    def an_engine_rejoins_before_its_departure_is_reported(self, which: int, more: int) -> None:
        known = list(self.engines.values())[which % len(self.engines)]
        self._drop_caches(known.engine)
        self._add_engine(known.engine, CAPACITY + more, known.page_tokens)

    def _add_engine(self, name: str, tokens: int, page: int) -> None:
        self.incarnations[name] += 1
        self.evicted[name] = 0
        joined = self.engines[name] = msg.EngineJoined(name, tokens, page, 0, self.incarnations[name])
        self.decide(joined)

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2))
    def an_engine_leaves(self, which: int) -> None:
        name = list(self.engines)[which % len(self.engines)]
        del self.engines[name]
        self._drop_caches(name)
        self.decide(msg.EngineLeft(name, "gone", self.incarnations[name]))

    @rule(name=st.sampled_from(NAMES))
    def an_engine_leaves_before_its_join_arrives(self, name: str) -> None:
        """EngineLeft of the new incarnation precedes its EngineJoined and replaces EngineLeft of the previous one."""
        self.incarnations[name] += 1
        self.engines.pop(name, None)
        self._drop_caches(name)
        self.decide(msg.EngineLeft(name, "gone", self.incarnations[name]))

    def _drop_caches(self, name: str) -> None:
        for trajectory in self.trajectories.values():
            if trajectory.engine == name:
                trajectory.engine, trajectory.leased = "", 0

    @precondition(lambda self: self.engines)
    @rule(which=st.integers(0, 2), evicted=st.sampled_from([0, 0, 7]))
    def an_engine_reports(self, which: int, evicted: int) -> None:
        name = list(self.engines)[which % len(self.engines)]
        self.evicted[name] += evicted
        self.decide(load(name, evicted_tokens=self.evicted[name], incarnation=self.incarnations[name]))

    # ---------------------------------------------------------------- trajectories

    @rule(size=st.integers(1, 5), prompt=st.sampled_from(PROMPTS))
    def a_group_starts(self, size: int, prompt: int) -> None:
        group = self.num_started
        for tid in range(self.num_started, self.num_started + size):
            self.trajectories[tid] = LiveTrajectory(group, prompt, prompt)
            self.num_started += 1
            self._request_lease(tid)

    @precondition(lambda self: self._has_any("running"))
    @rule(
        which=st.integers(0, 99), share=st.sampled_from([0.02, 0.1, 1.0]), then=st.sampled_from(["call", "end", "bad"])
    )
    def a_turn_ends(self, which: int, share: float, then: str) -> None:
        tid = self._choose("running", which)
        trajectory = self.trajectories[tid]
        limit = trajectory.prompt + RESPONSE
        most = trajectory.leased or limit  # 0 leased tokens: the engine has left while the turn's end is in flight
        trajectory.tokens += max(1, int(share * (most - trajectory.tokens)))
        if then == "end" or trajectory.tokens >= limit:
            self._end(tid)
        elif then == "call":
            trajectory.state = "parked"
            if self.policy != "worst_case":
                trajectory.leased = min(trajectory.leased, trajectory.tokens)
            self.decide(msg.LeasePaused(tid, trajectory.tokens))
        else:  # a malformed call gets an immediate result
            trajectory.turn += 1
            trajectory.tokens = min(trajectory.tokens + 5, limit - 1)
            self._request_lease(tid)

    @precondition(lambda self: self._has_any("running"))
    @rule(which=st.integers(0, 99))
    def a_lease_ends_within_a_turn(self, which: int) -> None:
        tid = self._choose("running", which)
        trajectory = self.trajectories[tid]
        trajectory.tokens = max(trajectory.tokens, trajectory.leased)
        if trajectory.tokens >= trajectory.prompt + RESPONSE:
            self._end(tid)
        else:
            self._request_lease(tid)

    @precondition(lambda self: self._has_any("running"))
    @rule(which=st.integers(0, 99))
    def a_turn_fails(self, which: int) -> None:
        self._request_lease(self._choose("running", which))

    @precondition(lambda self: self._has_any("parked"))
    @rule(which=st.integers(0, 99), result_tokens=st.sampled_from([1, 30, 5000]))
    def a_tool_answers(self, which: int, result_tokens: int) -> None:
        tid = self._choose("parked", which)
        trajectory = self.trajectories[tid]
        trajectory.turn += 1
        if trajectory.tokens + result_tokens >= trajectory.prompt + RESPONSE:
            self._end(tid)
        else:
            trajectory.tokens += result_tokens
            self._request_lease(tid)

    @precondition(lambda self: self._has_any("waiting"))
    @rule(which=st.integers(0, 99))
    def a_waiting_trajectory_is_aborted(self, which: int) -> None:
        self._end(self._choose("waiting", which))

    @precondition(lambda self: self.continuation_sent)
    @rule()
    def the_arbiter_continues(self) -> None:
        self.continuation_sent = False
        self.decide(msg.AdmissionContinued())

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.trajectories)
    @rule(which=st.integers(0, 99), kind=st.integers(0, 5))
    def a_forbidden_event_changes_nothing(self, which: int, kind: int) -> None:
        tid = list(self.trajectories)[which % len(self.trajectories)]
        trajectory = self.trajectories[tid]
        repeated = self._build_request(tid, max(1, trajectory.lease))
        paused_again = msg.LeasePaused(tid, trajectory.tokens - (trajectory.state == "running"))
        forbidden = (
            repeated,
            paused_again,
            msg.LeaseReleased(tid, trajectory.tokens - 1),
            msg.LeaseReleased(999_999, 1),
            msg.EngineJoined("a", 5, 64, 0, 99),
            load("nobody"),
        )[kind]
        self._expect_refused(forbidden)

    @rule(name=st.sampled_from(NAMES), earlier=st.integers(0, 2), kind=st.integers(0, 2))
    def stale_events_change_nothing(self, name: str, earlier: int, kind: int) -> None:
        """Duplicates from the current incarnation and reports of engines that have not joined are stale, too."""
        last = self.incarnations[name]
        incarnation = last - earlier
        is_joined = name in self.engines and incarnation == last
        match kind:
            case 0:
                self._expect_refused(msg.EngineJoined(name, CAPACITY, 1, 0, incarnation))
            case 1 if not is_joined:
                self._expect_refused(msg.EngineLeft(name, "gone", incarnation))
            case 2 if not is_joined:
                self._expect_refused(load(name, evicted_tokens=99, incarnation=incarnation))
            case _:
                pass

    def _expect_refused(self, event: msg.AnyMessage) -> None:
        before = snapshot(self.arbiter.ledger)
        with pytest.raises(msg.ProtocolError):
            self.arbiter.decide(self.now, event)
        assert snapshot(self.arbiter.ledger) == before

    # ---------------------------------------------------------------- invariants

    @invariant()
    def leases_are_conserved_and_a_shared_prompt_is_counted_once(self) -> None:
        for name, joined in self.engines.items():
            engine, page = self.arbiter.ledger.engines[name], joined.page_tokens
            here = [trajectory for trajectory in self.trajectories.values() if trajectory.engine == name]
            shared = {trajectory.group: trajectory.prompt // page for trajectory in here}
            own = sum(-(-trajectory.leased // page) - trajectory.prompt // page for trajectory in here)
            assert engine.leased_pages == own + sum(shared.values())
            assert engine.running == sum(trajectory.state == "running" for trajectory in here)
            assert len(engine.idle) == sum(trajectory.state == "parked" for trajectory in here)
        assert set(self.arbiter.ledger.accounts) == set(self.trajectories)

    @invariant()
    def capacity_is_never_oversold(self) -> None:
        if self.policy in ("worst_case", "kv_lookahead"):
            for engine in self.arbiter.ledger.engines.values():
                assert engine.leased_pages <= engine.total_pages

    @invariant()
    def no_trajectory_waits_while_nothing_runs(self) -> None:
        if self.engines and not self.continuation_sent and not self._has_any("running") and not self._has_any("parked"):
            assert not self.trajectories, self.trajectories

    @invariant()
    def no_new_trajectory_is_overtaken_by_more_than_the_bound(self) -> None:
        """Trajectory ids increase in the order of the first requests."""
        bound = MAX_OVERTAKES if self.policy == "kv_lookahead" else 0
        new = [tid for tid, trajectory in self.trajectories.items() if trajectory.lease == 0]
        for tid in [*new, *self.started]:
            before = self.started[: self.started.index(tid)] if tid in self.started else self.started
            assert sum(other > tid for other in before) <= bound

    def teardown(self) -> None:
        """Let every running trajectory use all its tokens; then every trajectory ends."""
        if not self.engines:
            self.an_engine_joins(0, 16)
        for _ in range(200 * (1 + len(self.trajectories))):
            if not self.trajectories:
                break
            if self.continuation_sent:
                self.the_arbiter_continues()
            elif self._has_any("running"):
                self.a_lease_ends_within_a_turn(0)
            elif self._has_any("parked"):
                self.a_tool_answers(0, 1)
            self.no_trajectory_waits_while_nothing_runs()
            self.leases_are_conserved_and_a_shared_prompt_is_counted_once()
            self.capacity_is_never_oversold()
        assert not self.trajectories, self.trajectories
        assert not self.arbiter.ledger.groups
        assert all(engine.leased_pages == 0 for engine in self.arbiter.ledger.engines.values())


def frame(effect: Send) -> bytes:
    return encode(msg.Envelope("head/arbiter", effect.to, effect.message))
