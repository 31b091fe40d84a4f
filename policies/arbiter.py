"""The KV-capacity arbiter: leases on engines' KV tokens. A decider around the books (policies.ledger) and a policy.

Consumes requests, pauses and ends of trajectories, engines that come, go and report. Produces grants with their reason,
deferrals with theirs, and the caches that engines are to forget. One decision grants `GRANTS` leases at most and goes on
by a message to itself, so that none takes long however much room becomes free at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from bus.messages import (
    AdmissionContinued,
    AnyMessage,
    CacheReleased,
    EngineJoined,
    EngineLeft,
    EngineLoadReported,
    LeaseDeferred,
    LeaseGranted,
    LeaseParked,
    LeaseReleased,
    LeaseRequested,
    LedgerReported,
    ProtocolError,
    RunStarted,
)
from policies.admission import Grant, Preemption
from policies.decider import Send
from policies.expectations import Expectations, Learned
from policies.ledger import Engine, Holding, Ledger
from policies.scheduling import PolicyName, policy_of

GRANTS = 8
_GATHERS = "for all that ask at the same time, then for room"


class Totals(msgspec.Struct, frozen=True):
    """What is cheap to fingerprint after each event, however many leases there are. By engine, as they have joined."""

    leased_pages: list[int]
    running: list[int]
    num_holdings: int


class Arbiter:
    """A decider (policies.decider.Decider). `holder` is the rollout process that it serves."""

    def __init__(
        self,
        policy: PolicyName = "kv_lookahead",
        response_tokens: int = 8192,
        *,
        holder: str = "rollout-0",
        address: str = "head/arbiter",
        observer: str = "launcher",
        completes: bool = False,
        expectations: Callable[[], Learned] | None = None,
    ) -> None:
        """`completes`: a step ends with the first complete groups. `expectations`: in place of what is learned."""
        self._name: PolicyName = policy
        self._holder = holder
        self._address = address
        self._observer = observer
        self._completes = completes
        self._new_expectations = expectations or (lambda: Expectations(response_tokens))
        self._begin()

    def _begin(self) -> None:
        self._continues = False
        self.expectations = self._new_expectations()
        self.ledger = Ledger(shrinks=self._name != "kv")
        self.policy = policy_of(self._name, self.ledger, self.expectations, completes=self._completes)

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():  # neither trajectories nor engines outlive the head: engines join again
                self._begin()
                return []
            case LeaseRequested():
                return self._request(event, now)
            case LeaseParked():
                return self._park(event, now)
            case LeaseReleased():
                return self._release(event, now)
            case EngineLoadReported():
                return self._note(event, now)
            case EngineJoined():
                return self._join(event, now)
            case EngineLeft():
                return self._leave(event, now)
            case AdmissionContinued():
                self._continues = False
                return self._admit(now)
            case _:
                raise ProtocolError(f"the arbiter has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        engines = self.ledger.engines.values()
        leased_pages = [engine.leased_pages for engine in engines]
        return Totals(leased_pages, [engine.running for engine in engines], len(self.ledger.holdings))

    # ---------------------------------------------------------------- trajectories

    def _request(self, event: LeaseRequested, now: float) -> list[Send]:
        holding = self.ledger.request(event, self._holder, now)
        self.expectations.asked(holding)
        self.policy.waits(holding)
        if self.policy.gathers and not holding.leases:
            return [Send(holding.holder, LeaseDeferred(event.trajectory_id, _GATHERS)), *self._continue()]
        effects = self._admit(now)
        if holding.state == "waiting":
            effects.append(Send(holding.holder, LeaseDeferred(event.trajectory_id, self.policy.why(holding))))
        return effects

    def _park(self, event: LeaseParked, now: float) -> list[Send]:
        holding = self.ledger.park(event.trajectory_id, event.tokens)
        self.expectations.turn_ended(holding)
        if holding.engine is not None:  # which may have left since
            self.policy.changed(holding.engine)
        return self._admit(now)

    def _release(self, event: LeaseReleased, now: float) -> list[Send]:
        known = self.ledger.holdings.get(event.trajectory_id)
        engine = known.engine if known is not None else None
        holding = self.ledger.release(event.trajectory_id, event.tokens)
        if holding.state == "running":  # its last turn ends with it
            self.expectations.turn_ended(holding)
        self.expectations.ended(holding)
        self.policy.withdrawn(holding)
        self.policy.ended(holding)
        if engine is not None:
            self.policy.dropped(holding, engine)
            self.policy.changed(engine)
        return self._admit(now)

    # ---------------------------------------------------------------- engines

    def _join(self, event: EngineJoined, now: float) -> list[Send]:
        known = self.ledger.engines.get(event.engine)
        lost = self.ledger.join(event)
        if known is not None:
            self._lose(known, lost)
        self.policy.changed(self.ledger.engines[event.engine])
        return self._admit(now)

    def _leave(self, event: EngineLeft, now: float) -> list[Send]:
        engine = self.ledger.engines.get(event.engine)
        lost = self.ledger.leave(event)
        if engine is not None:
            self._lose(engine, lost)
        return self._admit(now)

    def _lose(self, engine: Engine, lost: Sequence[Holding]) -> None:
        """Those that waited go on waiting, without a cache; a running one asks again when it hears of its failure."""
        self.policy.left(engine)
        for holding in lost:
            if holding.state == "waiting":
                self.policy.waits(holding)

    def _note(self, event: EngineLoadReported, now: float) -> list[Send]:
        engine = self.ledger.reporting(event)
        engine.note(event)
        self.policy.measured(engine)
        self.policy.changed(engine)
        page = engine.page_tokens
        waiting = len(engine.holdings) - engine.running - len(engine.parked)
        report = LedgerReported(
            engine=event.engine,
            leased_tokens=engine.leased_pages * page,
            usable_tokens=engine.usable_pages * page,
            running=engine.running,
            parked=len(engine.parked),
            waiting=waiting,
            used_tokens=event.used_tokens,
        )
        return [Send(self._observer, report), *self._admit(now)]

    # ---------------------------------------------------------------- decisions

    def _admit(self, now: float) -> list[Send]:
        effects: list[Send] = []
        for _ in range(GRANTS):
            match self.policy.next(now):
                case None:
                    return effects
                case Grant() as grant:
                    self._grant(grant, now, effects)
                case Preemption(holding=holding, reason=reason):
                    effects.append(self._drop(holding))
                    effects.append(Send(holding.holder, LeaseDeferred(holding.trajectory_id, reason)))
                    self.policy.waits(holding)
        return effects + self._continue()

    def _continue(self) -> list[Send]:
        if self._continues:
            return []
        self._continues = True
        return [Send(self._address, AdmissionContinued())]

    def _grant(self, grant: Grant, now: float, effects: list[Send]) -> None:
        for holding in grant.drop:
            effects.append(self._drop(holding))
        holding, engine = grant.holding, grant.engine
        if holding.engine is not None and holding.engine is not engine:
            effects.append(self._drop(holding))
        self.policy.withdrawn(holding)
        self.ledger.lease(holding, engine, grant.tokens, oversell=self.policy.oversells)
        self.expectations.leased(holding)
        self.policy.leased(holding)
        granted = LeaseGranted(
            trajectory_id=holding.trajectory_id,
            engine=engine.name,
            tokens=grant.tokens,
            lease=holding.leases,
            waited_s=now - holding.since,
            reason=grant.reason,
            life=engine.life,
        )
        effects.append(Send(holding.holder, granted))

    def _drop(self, holding: Holding) -> Send:
        engine = holding.engine
        assert engine is not None
        self.ledger.drop(holding)
        self.policy.dropped(holding, engine)
        return Send(engine.name, CacheReleased(holding.trajectory_id, holding.leases))
