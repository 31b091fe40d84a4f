"""kv_lookahead: leases by expected lengths, the longest first, with little recomputation.

Engines never have to evict. The policy leases the free pages of an engine in this order:
    1. turns on the engine that have used up their lease, the oldest trajectory first: they hold a
       cache and decode nothing
    2. trajectories with a tool result and a cache on the engine, the oldest first
    3. trajectories with an evicted cache, on any engine with room, the oldest first
    4. new trajectories: the first few of each group, to learn the group's length; then the longest
       expected. If a step ends with the first complete groups: members of the group with the
       fewest trajectories left

If a trajectory of 1 or 2 finds no room, the policy evicts the caches of idle trajectories, the longest
idle first, because a slow tool call probably stays slow. If no trajectory runs on the engine, or after
`_PREEMPT_AFTER_S`, it then evicts the cache of the youngest trajectory that waits there. The oldest
trajectory never loses its cache to a younger one, so every trajectory ends.

Trajectories of 3 and 4 must also fit the expected peak demand of the engine's trajectories
(asterism.policies.arbiter.kv_demand). They start on an engine with a few of their siblings, to share
the prompt; else on the engine with the lowest expected demand; else on any engine. New trajectories
wait until all requests of the same moment have arrived.

When no trajectory is left to begin, trajectories migrate so that all engines finish together
(asterism.policies.arbiter.rebalancing). At most `_MAX_OVERTAKES` later trajectories begin before a
waiting new trajectory; then only that trajectory may begin (asterism.policies.arbiter.start_queue).
"""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from asterism.policies.arbiter.kv_demand import KvDemandForecast
from asterism.policies.arbiter.kv_ledger import EngineAccount, KvAccount, Ledger
from asterism.policies.arbiter.policy import Grant, LengthForecast, Preemption
from asterism.policies.arbiter.rebalancing import Rebalancer
from asterism.policies.arbiter.resume_queue import ResumeQueue
from asterism.policies.arbiter.start_queue import StartQueue

_LEASE_QUANTILE = 0.9  # share of the turns that end within their first lease
_MIN_LEASE_TOKENS = 64  # new tokens; a shorter lease costs more messages than it is worth
_MAX_LEASE_TOKENS = 256  # new tokens; a longer lease reserves room that stays unused for long
_MAX_SIBLINGS_PER_ENGINE = 4  # most members of a group on one engine while other engines also have room
_PREEMPT_AFTER_S = 1.0  # seconds that an older trajectory waits before a younger one loses its cache
_MAX_OVERTAKES = 65_536
_PREEMPTION_REASON = "an older trajectory needs its pages"


class LookaheadPolicy:
    """The policy `kv_lookahead` (implements asterism.policies.arbiter.policy.Policy)."""

    may_oversell = False
    batches_arrivals = True

    def __init__(
        self,
        ledger: Ledger,
        length_forecast: LengthForecast,
        *,
        max_overtakes: int = _MAX_OVERTAKES,
        ends_at_first_groups: bool = False,
    ) -> None:
        """`ends_at_first_groups`: a step ends with its first complete groups."""
        self._ledger = ledger
        self._length_forecast = length_forecast
        self._kv_demand: dict[str, KvDemandForecast] = {}
        self._rebalancer = Rebalancer()
        self._resume_queue = ResumeQueue()
        self._start_queue = StartQueue(
            ledger.groups,
            length_forecast.estimate_final_tokens,
            max_overtakes=max_overtakes,
            ends_at_first_groups=ends_at_first_groups,
        )
        # Whether trajectories without a cache arrived after the last attempt to place one.
        self._has_unplaced = False
        # Engines that changed after their trajectories with a cache were last served.
        self._changed_engines: OrderedDict[str, None] = OrderedDict()
        # Engines that changed after the last attempt to place trajectories without a cache.
        self._engines_with_new_room: dict[str, None] = {}

    # ---------------------------------------------------------------- events

    def on_waiting(self, account: KvAccount) -> None:
        if account.num_leases:
            # The trajectory's length so far changes the expected length of its group.
            self._start_queue.update_rank(account.group_id)
            self._resume_queue.push(account)
        else:
            self._start_queue.add(account)
        if account.engine is None:
            self._has_unplaced = True
        else:
            self._changed_engines[account.engine.name] = None

    def on_withdrawn(self, account: KvAccount) -> None:
        self._resume_queue.discard(account.trajectory_id)
        self._start_queue.discard(account.trajectory_id)

    def on_load_reported(self, engine: EngineAccount) -> None:
        self._rebalancer.on_load_reported(engine, self._get_kv_demand(engine))

    def on_capacity_changed(self, engine: EngineAccount) -> None:
        self._changed_engines[engine.name] = None

    def on_leased(self, account: KvAccount) -> None:
        assert account.engine is not None
        final_tokens = self._length_forecast.estimate_final_tokens(account)
        survival_curve = partial(self._length_forecast.survival_curve, account)
        self._get_kv_demand(account.engine).update(
            account.trajectory_id, account.tokens, account.leased_tokens, final_tokens, survival_curve
        )

    def on_pages_released(self, account: KvAccount, engine: EngineAccount) -> None:
        forecast = self._kv_demand.get(engine.name)
        if forecast is not None:
            forecast.remove(account.trajectory_id)

    def on_engine_left(self, engine: EngineAccount) -> None:
        self._rebalancer.on_engine_left(engine)
        self._resume_queue.remove_engine(engine.name)
        for table in (self._kv_demand, self._changed_engines, self._engines_with_new_room):
            table.pop(engine.name, None)

    def on_ended(self, account: KvAccount) -> None:
        if account.group_id in self._ledger.groups:
            self._start_queue.update_rank(account.group_id)
        else:
            self._start_queue.remove_group(account.group_id)

    # ---------------------------------------------------------------- decisions

    def decide_next(self, now: float) -> Grant | Preemption | None:
        while self._changed_engines:
            engine = self._ledger.engines[next(iter(self._changed_engines))]
            decision = self._serve_waiting_with_cache(engine, now)
            if decision is not None:
                return decision
            del self._changed_engines[engine.name]
            self._engines_with_new_room[engine.name] = None
        if self._has_unplaced or self._engines_with_new_room:
            grant = self._start_anywhere()
            if grant is not None:
                return grant
            self._has_unplaced = False
            self._engines_with_new_room.clear()
        return None

    def get_wait_reason(self, account: KvAccount) -> str:
        if not self._ledger.engines:
            return "no engine has joined"
        engine = account.engine
        if engine is not None:
            return f"{engine.name} holds its cache, and has {engine.count_free_pages_for(account)} free pages"
        return "no engine has room for it and for the expected growth of its other trajectories"

    # ---------------------------------------------------------------- trajectories with a cache

    def _serve_waiting_with_cache(self, engine: EngineAccount, now: float) -> Grant | Preemption | None:
        account = self._resume_queue.peek_cached(engine.name)
        if account is None:
            return None
        tokens = self._compute_lease_tokens(account)
        target = self._find_migration_target(account, engine, tokens)
        if target is not None:
            reason = f"{engine.name} is expected to finish last, and {target.name} first"
            return Grant(account, target, tokens, reason)
        reason = "continues its turn" if account.is_extension else "its cache is there"
        to_evict = self._select_idle_to_evict(account, engine, tokens)
        if to_evict is not None:
            return Grant(account, engine, tokens, reason, to_evict)
        shorter = self._compute_fitting_lease(account, engine)
        if shorter is not None:
            return Grant(account, engine, shorter, f"{reason}, limited by the room")
        least = min(tokens, account.tokens + _MIN_LEASE_TOKENS)
        to_evict = self._select_idle_to_evict(account, engine, least)
        if to_evict is not None:
            return Grant(account, engine, least, f"{reason}, limited by the room", to_evict)
        if engine.running and now - account.waiting_since < _PREEMPT_AFTER_S:
            return None
        waiting = self._resume_queue.list_cached(engine.name)
        return Preemption(max(waiting, key=lambda each: each.arrival), _PREEMPTION_REASON) if len(waiting) > 1 else None

    def _find_migration_target(self, account: KvAccount, engine: EngineAccount, tokens: int) -> EngineAccount | None:
        """Return the target of a migration that lets all engines finish together, or None without such a target."""
        if self._peek_unplaced()[0] is not None:
            return None
        remaining_tokens = self._length_forecast.estimate_final_tokens(account) - account.tokens
        name = self._rebalancer.find_migration_target(engine.name, account.tokens, remaining_tokens)
        if name is None:
            return None
        target = self._ledger.engines[name]
        if self._ledger.count_missing_pages(account, target, tokens) > target.count_free_pages_for(account):
            return None
        self._rebalancer.on_migrated(engine.name, name, account.tokens, remaining_tokens)
        return target

    def _select_idle_to_evict(
        self, account: KvAccount, engine: EngineAccount, tokens: int
    ) -> tuple[KvAccount, ...] | None:
        """Return the caches to evict for a lease of `tokens`, or None if even all idle caches free too few tokens."""
        missing = self._ledger.count_missing_pages(account, engine, tokens)
        if missing <= engine.count_free_pages_for(account):
            return ()
        missing -= engine.compute_headroom_for(account)
        to_evict: list[KvAccount] = []
        for idle in engine.idle.values():
            to_evict.append(idle)
            missing -= idle.pages
            if missing <= 0:
                return tuple(to_evict)
        return None

    def _compute_fitting_lease(self, account: KvAccount, engine: EngineAccount) -> int | None:
        """Return a lease of all free pages, or None if it adds too few tokens (for a lone account, 1 suffices)."""
        held_pages = account.pages + account.count_shared_pages(engine)
        max_tokens = account.tokens + account.request.max_new_tokens
        tokens = min((held_pages + engine.count_free_pages_for(account)) * engine.page_tokens, max_tokens)
        min_new_tokens = 1 if len(engine.accounts) == 1 else _MIN_LEASE_TOKENS
        return tokens if tokens >= account.tokens + min_new_tokens else None

    def _compute_lease_tokens(self, account: KvAccount) -> int:
        turn_tokens = account.tokens - account.turn_start_tokens
        remaining = self._length_forecast.estimate_turn_tokens(account, _LEASE_QUANTILE) - turn_tokens
        new_tokens = max(min(remaining, _MAX_LEASE_TOKENS), _MIN_LEASE_TOKENS)
        return account.tokens + min(account.request.max_new_tokens, new_tokens)

    # ---------------------------------------------------------------- trajectories without a cache

    def _start_anywhere(self) -> Grant | None:
        first, overdue = self._peek_unplaced()
        if first is None:
            return None
        for engine in self._rank_engines(first):
            grant = self._start_on(first, engine, overdue=overdue)
            if grant is not None:
                return grant
        return None

    def _rank_engines(self, account: KvAccount) -> Iterator[EngineAccount]:
        """Yield the engines to try, best first, except engines where a trajectory with a cache waits."""
        engines = [
            engine for engine in self._ledger.engines.values() if self._resume_queue.peek_cached(engine.name) is None
        ]
        if not engines:
            return
        roomiest = max(engines, key=self._compute_uncommitted_tokens)
        slack = _MAX_SIBLINGS_PER_ENGINE * self._length_forecast.limit
        min_uncommitted = self._compute_uncommitted_tokens(roomiest) - slack
        for engine in engines:
            has_few_siblings = 0 < engine.group_members.get(account.group_id, 0) < _MAX_SIBLINGS_PER_ENGINE
            if has_few_siblings and self._compute_uncommitted_tokens(engine) > min_uncommitted:
                yield engine
        yield roomiest
        others = (engine for engine in engines if engine is not roomiest)
        roomier = [engine for engine in others if engine.name in self._engines_with_new_room or not engine.accounts]
        yield from sorted(roomier, key=self._compute_uncommitted_tokens, reverse=True)

    def _compute_uncommitted_tokens(self, engine: EngineAccount) -> float:
        return engine.usable_pages * engine.page_tokens - self._get_kv_demand(engine).committed_tokens

    def _start_on(self, account: KvAccount, engine: EngineAccount, *, overdue: bool) -> Grant | None:
        tokens = self._compute_lease_tokens(account)
        if self._ledger.count_missing_pages(account, engine, tokens) > engine.count_free_pages_for(account):
            return None
        if not overdue and engine.accounts:
            capacity = engine.usable_pages * engine.page_tokens
            survival_curve = self._length_forecast.survival_curve(account)
            if not self._get_kv_demand(engine).can_fit(account.tokens, survival_curve, capacity):
                return None
        if account.trajectory_id in self._start_queue:
            self._start_queue.mark_started(account)
            return Grant(account, engine, tokens, "overdue" if overdue else "expected to be among the longest")
        return Grant(account, engine, tokens, "there is room to recompute its cache")

    def _peek_unplaced(self) -> tuple[KvAccount | None, bool]:
        """Return the next trajectory without a cache, and whether it is overdue."""
        evicted = self._resume_queue.peek_evicted()
        return (evicted, False) if evicted is not None else self._start_queue.peek()

    def _get_kv_demand(self, engine: EngineAccount) -> KvDemandForecast:
        forecast = self._kv_demand.get(engine.name)
        if forecast is None:
            forecast = self._kv_demand[engine.name] = KvDemandForecast(self._length_forecast.limit)
        return forecast
