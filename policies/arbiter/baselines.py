"""The baseline policies: an engine router, and a queue in order of arrival.

    static          one fixed engine for each group (the report's baseline)
    round_robin     the next engine for each request
    least_requests  the engine with the fewest running trajectories
    worst_case      the engine with the most free KV tokens, first come, first served; the lease covers
                    the worst case until the trajectory ends, so that engines never evict a cache
                    (the report's scheduler)

The first three grant every request immediately: engines that overflow evict and recompute.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain, count

from asterism.policies.arbiter.kv_ledger import EngineAccount, KvAccount, Ledger
from asterism.policies.arbiter.policy import Grant, Preemption

# Returns the engine for an account's request of a number of tokens; None if the request must wait.
EngineRouter = Callable[[Ledger, KvAccount, int], EngineAccount | None]


class FcfsPolicy:
    """First come, first served: the first request waits until the router finds an engine.

    A lease covers the worst case. Trajectories with a cached prefix are served first, because the
    other trajectories might need the pages of that prefix.
    """

    batches_arrivals = False

    def __init__(self, ledger: Ledger, choose_engine: EngineRouter, reason: str, *, may_oversell: bool) -> None:
        """`reason`: the router's criterion, which each grant reports."""
        self.may_oversell = may_oversell
        self._ledger = ledger
        self._choose_engine, self._reason = choose_engine, reason
        self._waiting_with_cache: OrderedDict[int, KvAccount] = OrderedDict()
        self._waiting: OrderedDict[int, KvAccount] = OrderedDict()

    def on_waiting(self, account: KvAccount) -> None:
        self._waiting_with_cache.pop(account.trajectory_id, None)  # the engine of the cache may have left
        queue = self._waiting if account.engine is None else self._waiting_with_cache
        queue[account.trajectory_id] = account

    def on_withdrawn(self, account: KvAccount) -> None:
        self._waiting_with_cache.pop(account.trajectory_id, None)
        self._waiting.pop(account.trajectory_id, None)

    def on_load_reported(self, engine: EngineAccount) -> None: ...

    def on_capacity_changed(self, engine: EngineAccount) -> None: ...

    def on_leased(self, account: KvAccount) -> None: ...

    def on_pages_released(self, account: KvAccount, engine: EngineAccount) -> None: ...

    def on_ended(self, account: KvAccount) -> None: ...

    def on_engine_left(self, engine: EngineAccount) -> None: ...

    def decide_next(self, now: float) -> Grant | Preemption | None:
        account = next(chain(self._waiting_with_cache.values(), self._waiting.values()), None)
        if account is None or not self._ledger.engines:
            return None
        tokens = account.tokens + account.request.max_new_tokens
        engine = self._choose_engine(self._ledger, account, tokens)
        return None if engine is None else Grant(account, engine, tokens, self._reason)

    def get_wait_reason(self, account: KvAccount) -> str:
        if not self._ledger.engines:
            return "no engine has joined"
        num_ahead = len(self._waiting_with_cache) + (len(self._waiting) if account.engine is None else 0) - 1
        return f"no engine has room for {'it' if num_ahead == 0 else f'the first of {num_ahead} requests ahead of it'}"


def choose_by_group(ledger: Ledger, account: KvAccount, tokens: int) -> EngineAccount | None:
    engines = list(ledger.engines.values())
    return account.engine or engines[account.group_id % len(engines)]


def make_round_robin_router() -> EngineRouter:
    numbers = count(1)

    def choose_next(ledger: Ledger, account: KvAccount, tokens: int) -> EngineAccount | None:
        engines = list(ledger.engines.values())
        return engines[next(numbers) % len(engines)]

    return choose_next


def choose_least_busy(ledger: Ledger, account: KvAccount, tokens: int) -> EngineAccount | None:
    return min(ledger.engines.values(), key=lambda engine: engine.running)


def choose_most_free_kv(ledger: Ledger, account: KvAccount, tokens: int) -> EngineAccount | None:
    """Keep a trajectory on the engine of its first lease, which covers the worst case."""
    engines = ledger.engines.values() if account.engine is None else (account.engine,)
    fitting = [
        engine
        for engine in engines
        if ledger.count_missing_pages(account, engine, tokens) <= engine.count_free_pages_for(account)
    ]
    return max(fitting, key=lambda engine: engine.free_pages * engine.page_tokens, default=None)
