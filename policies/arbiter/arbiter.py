"""The KV-capacity arbiter: a decider that leases engines' KV tokens to trajectories.

Combines the ledger (asterism.policies.arbiter.kv_ledger) with a policy (asterism.policies.arbiter.policy). Consumes
lease requests, pauses and releases, and joins, departures and load reports of engines. Produces
grants and deferrals with a reason, and evictions. One decision grants at most
`MAX_GRANTS_PER_DECISION` leases and continues with a message to itself, which bounds its time.
"""

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import msgspec

from asterism.bus.addresses import ARBITER, LAUNCHER, ROLLOUT
from asterism.bus.messages import (
    AdmissionContinued,
    AnyMessage,
    CacheReleased,
    EngineJoined,
    EngineLeft,
    EngineLoadReported,
    LeaseDeferred,
    LeaseGranted,
    LeasePaused,
    LeaseReleased,
    LeaseRequested,
    LedgerReported,
    ProtocolError,
    RunStarted,
)
from asterism.policies.arbiter import baselines
from asterism.policies.arbiter.baselines import FcfsPolicy
from asterism.policies.arbiter.kv_ledger import EngineAccount, KvAccount, Ledger
from asterism.policies.arbiter.kv_lookahead import LookaheadPolicy
from asterism.policies.arbiter.length_estimates import LearnedLengthForecast, OnlineLengthForecast
from asterism.policies.arbiter.policy import Grant, LengthForecast, Policy, Preemption
from asterism.policies.decider import Send

PolicyName = Literal["static", "round_robin", "least_requests", "worst_case", "kv_lookahead"]
MAX_GRANTS_PER_DECISION = 8
_BATCHING_REASON = "for requests made at the same time, then for room"


class ArbiterStateSummary(msgspec.Struct, frozen=True):
    """The part of the state that is fingerprinted after each event. Lists have one item per engine, in join order."""

    leased_pages: list[int]
    running: list[int]
    num_accounts: int


class Arbiter:
    """A decider (asterism.policies.decider.Decider) for the rollout process at `rollout_address`."""

    def __init__(
        self,
        policy: PolicyName = "kv_lookahead",
        response_tokens: int = 8192,
        *,
        rollout_address: str = ROLLOUT,
        address: str = ARBITER,
        observer_address: str = LAUNCHER,
        ends_at_first_groups: bool = False,
        forecast_factory: Callable[[], OnlineLengthForecast] | None = None,
    ) -> None:
        """`ends_at_first_groups`: see LookaheadPolicy. `forecast_factory` replaces LearnedLengthForecast."""
        self._policy_name: PolicyName = policy
        self._rollout_address = rollout_address
        self._address = address
        self._observer_address = observer_address
        self._ends_at_first_groups = ends_at_first_groups
        self._new_length_forecast = forecast_factory or (lambda: LearnedLengthForecast(response_tokens))
        self._reset()

    def _reset(self) -> None:
        self._continuation_sent = False
        self.length_forecast = self._new_length_forecast()
        self.ledger = Ledger(shrinks_paused_leases=self._policy_name != "worst_case")
        self.policy = make_policy(
            self._policy_name, self.ledger, self.length_forecast, ends_at_first_groups=self._ends_at_first_groups
        )

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():  # a restarted head has no trajectories, and engines join again
                self._reset()
                return []
            case LeaseRequested():
                return self._on_lease_requested(event, now)
            case LeasePaused():
                return self._on_lease_paused(event, now)
            case LeaseReleased():
                return self._on_lease_released(event, now)
            case EngineLoadReported():
                return self._on_engine_load_reported(event, now)
            case EngineJoined():
                return self._on_engine_joined(event, now)
            case EngineLeft():
                return self._on_engine_left(event, now)
            case AdmissionContinued():
                self._continuation_sent = False
                return self._admit(now)
            case _:
                raise ProtocolError(f"the arbiter does not accept {type(event).__name__}")

    def get_state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        engines = self.ledger.engines.values()
        leased_pages = [engine.leased_pages for engine in engines]
        return ArbiterStateSummary(leased_pages, [engine.running for engine in engines], len(self.ledger.accounts))

    # ---------------------------------------------------------------- trajectories

    def _on_lease_requested(self, event: LeaseRequested, now: float) -> list[Send]:
        account = self.ledger.enqueue_request(event, self._rollout_address, now)
        self.length_forecast.on_lease_requested(account)
        self.policy.on_waiting(account)
        if self.policy.batches_arrivals and not account.num_leases:
            return [
                Send(account.rollout_address, LeaseDeferred(event.trajectory_id, _BATCHING_REASON)),
                *self._request_continuation(),
            ]
        effects = self._admit(now)
        if account.state == "waiting":
            effects.append(
                Send(account.rollout_address, LeaseDeferred(event.trajectory_id, self.policy.get_wait_reason(account)))
            )
        return effects

    def _on_lease_paused(self, event: LeasePaused, now: float) -> list[Send]:
        account = self.ledger.mark_idle(event.trajectory_id, event.tokens)
        self.length_forecast.on_turn_ended(account)
        if account.engine is not None:  # the engine may have left
            self.policy.on_capacity_changed(account.engine)
        return self._admit(now)

    def _on_lease_released(self, event: LeaseReleased, now: float) -> list[Send]:
        known = self.ledger.accounts.get(event.trajectory_id)
        engine = known.engine if known is not None else None
        account = self.ledger.close_account(event.trajectory_id, event.tokens)
        if account.state == "running":
            self.length_forecast.on_turn_ended(account)
        self.length_forecast.on_trajectory_ended(account)
        self.policy.on_withdrawn(account)
        self.policy.on_ended(account)
        if engine is not None:
            self.policy.on_pages_released(account, engine)
            self.policy.on_capacity_changed(engine)
        return self._admit(now)

    # ---------------------------------------------------------------- engines

    def _on_engine_joined(self, event: EngineJoined, now: float) -> list[Send]:
        known = self.ledger.engines.get(event.engine)
        evicted = self.ledger.add_engine(event)
        if known is not None:
            self._remove_engine(known, evicted)
        self.policy.on_capacity_changed(self.ledger.engines[event.engine])
        return self._admit(now)

    def _on_engine_left(self, event: EngineLeft, now: float) -> list[Send]:
        engine = self.ledger.engines.get(event.engine)
        evicted = self.ledger.remove_engine(event)
        if engine is not None:
            self._remove_engine(engine, evicted)
        return self._admit(now)

    def _remove_engine(self, engine: EngineAccount, evicted: Sequence[KvAccount]) -> None:
        """Queue the engine's waiting trajectories again; running ones request a lease after TurnFailed."""
        self.policy.on_engine_left(engine)
        for account in evicted:
            if account.state == "waiting":
                self.policy.on_waiting(account)

    def _on_engine_load_reported(self, event: EngineLoadReported, now: float) -> list[Send]:
        engine = self.ledger.find_reporting_engine(event)
        engine.apply_report(event)
        self.policy.on_load_reported(engine)
        self.policy.on_capacity_changed(engine)
        page = engine.page_tokens
        waiting = len(engine.accounts) - engine.running - len(engine.idle)
        report = LedgerReported(
            engine=event.engine,
            leased_tokens=engine.leased_pages * page,
            usable_tokens=engine.usable_pages * page,
            running=engine.running,
            idle=len(engine.idle),
            waiting=waiting,
            used_tokens=event.used_tokens,
        )
        return [Send(self._observer_address, report), *self._admit(now)]

    # ---------------------------------------------------------------- decisions

    def _admit(self, now: float) -> list[Send]:
        effects: list[Send] = []
        for _ in range(MAX_GRANTS_PER_DECISION):
            match self.policy.decide_next(now):
                case None:
                    return effects
                case Grant() as grant:
                    self._grant(grant, now, effects)
                case Preemption(account=account, reason=reason):
                    effects.append(self._evict(account))
                    effects.append(Send(account.rollout_address, LeaseDeferred(account.trajectory_id, reason)))
                    self.policy.on_waiting(account)
        return effects + self._request_continuation()

    def _request_continuation(self) -> list[Send]:
        if self._continuation_sent:
            return []
        self._continuation_sent = True
        return [Send(self._address, AdmissionContinued())]

    def _grant(self, grant: Grant, now: float, effects: list[Send]) -> None:
        for account in grant.to_evict:
            effects.append(self._evict(account))
        account, engine = grant.account, grant.engine
        if account.engine is not None and account.engine is not engine:
            effects.append(self._evict(account))
        self.policy.on_withdrawn(account)
        self.ledger.grant_lease(account, engine, grant.tokens, oversell=self.policy.may_oversell)
        self.length_forecast.on_leased(account)
        self.policy.on_leased(account)
        granted = LeaseGranted(
            trajectory_id=account.trajectory_id,
            engine=engine.name,
            tokens=grant.tokens,
            lease=account.num_leases,
            waited_s=now - account.waiting_since,
            reason=grant.reason,
            incarnation=engine.incarnation,
        )
        effects.append(Send(account.rollout_address, granted))

    def _evict(self, account: KvAccount) -> Send:
        engine = account.engine
        assert engine is not None
        self.ledger.release_pages(account)
        self.policy.on_pages_released(account, engine)
        return Send(engine.name, CacheReleased(account.trajectory_id, account.num_leases))


def make_policy(
    name: PolicyName, ledger: Ledger, length_forecast: LengthForecast, *, ends_at_first_groups: bool
) -> Policy:
    """Return the policy `name`. Policies other than LookaheadPolicy ignore `ends_at_first_groups`."""
    match name:
        case "static":
            return FcfsPolicy(ledger, baselines.choose_by_group, "its group's engine", may_oversell=True)
        case "round_robin":
            router = baselines.make_round_robin_router()
            return FcfsPolicy(ledger, router, "the next engine in round-robin order", may_oversell=True)
        case "least_requests":
            reason = "the fewest trajectories run there"
            return FcfsPolicy(ledger, baselines.choose_least_busy, reason, may_oversell=True)
        case "worst_case":
            reason = "the most KV tokens are free there"
            return FcfsPolicy(ledger, baselines.choose_most_free_kv, reason, may_oversell=False)
        case "kv_lookahead":
            return LookaheadPolicy(ledger, length_forecast, ends_at_first_groups=ends_at_first_groups)
        case _:
            assert_never(name)
