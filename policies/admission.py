"""The seam between the arbiter and its policies, and the simple ones: where a request goes, and whether it waits.

    static          an engine for each group, in turn, whatever happens: rollouts are divided up front (the report's baseline)
    round_robin     an engine for each request, in turn
    least_requests  the engine with the fewest trajectories that run
    kv              first come, first served, to the engine with the most free KV tokens; the lease is the worst case, so
                    that nothing is ever evicted (the report's scheduler)
    kv_lookahead    policies.lookahead

The first three grant whatever is asked for at once: engines overflow, and evict and compute again by themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

from policies.ledger import Engine, Holding, Ledger


class Grant(NamedTuple):
    """Lease `tokens` in all to the holding there, after what is in `drop` has lost its cache."""

    holding: Holding
    engine: Engine
    tokens: int
    reason: str
    drop: tuple[Holding, ...] = ()


class Preemption(NamedTuple):
    """It waits in the middle of a turn, and loses its cache for others."""

    holding: Holding
    reason: str


class Policy(Protocol):
    """Told of everything that happens; asked for the next decision until it has none. Holdings are the ledger's."""

    oversells: bool

    def waits(self, holding: Holding) -> None:
        """It has asked, or has lost what it had while it waited."""
        ...

    def withdrawn(self, holding: Holding) -> None:
        """It waited, and does no longer: it was granted, or has ended."""
        ...

    def changed(self, engine: Engine) -> None:
        """It has joined, or pages there may have become free."""
        ...

    def leased(self, holding: Holding) -> None:
        """It runs now."""
        ...

    def parked(self, holding: Holding) -> None:
        """A tool works for it."""
        ...

    def dropped(self, holding: Holding, engine: Engine) -> None:
        """It has no cache there any more."""
        ...

    def ended(self, holding: Holding) -> None:
        """It needs nothing any more."""
        ...

    def left(self, engine: Engine) -> None: ...

    def next(self, now: float) -> Grant | Preemption | None: ...

    def why(self, holding: Holding) -> str:
        """What a request that was not granted at once waits for."""
        ...


class InOrder:
    """First come, first served: the first waits until `choose` finds it an engine. The lease is the worst case."""

    def __init__(self, ledger: Ledger, choose: Chooser, *, oversells: bool) -> None:
        self.oversells = oversells
        self._ledger = ledger
        self._choose = choose
        self._queue: OrderedDict[int, Holding] = OrderedDict()

    def waits(self, holding: Holding) -> None:
        self._queue[holding.trajectory_id] = holding
        if holding.engine is not None:  # its lease covers it still: behind one that waits for room both would wait for ever
            self._queue.move_to_end(holding.trajectory_id, last=False)

    def withdrawn(self, holding: Holding) -> None:
        self._queue.pop(holding.trajectory_id, None)

    def changed(self, engine: Engine) -> None: ...

    def leased(self, holding: Holding) -> None: ...

    def parked(self, holding: Holding) -> None: ...

    def dropped(self, holding: Holding, engine: Engine) -> None: ...

    def ended(self, holding: Holding) -> None: ...

    def left(self, engine: Engine) -> None: ...

    def next(self, now: float) -> Grant | Preemption | None:
        if not self._queue or not self._ledger.engines:
            return None
        holding = next(iter(self._queue.values()))
        tokens = holding.tokens + holding.request.max_new_tokens
        engine = self._choose(self._ledger, holding, tokens)
        return None if engine is None else Grant(holding, engine, tokens, self._choose.reason)

    def why(self, holding: Holding) -> str:
        return (
            "no engine has joined"
            if not self._ledger.engines
            else f"{len(self._queue) - 1} are before it, or no engine has room"
        )


class Chooser(Protocol):
    """An engine for the request, or None if it has to wait."""

    reason: str

    def __call__(self, ledger: Ledger, holding: Holding, tokens: int) -> Engine | None: ...


class Static:
    reason = "its group's engine"

    def __call__(self, ledger: Ledger, holding: Holding, tokens: int) -> Engine | None:
        engines = list(ledger.engines.values())
        return holding.engine or engines[holding.group_id % len(engines)]


class RoundRobin:
    reason = "the next engine in turn"

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, ledger: Ledger, holding: Holding, tokens: int) -> Engine | None:
        self._turn += 1
        engines = list(ledger.engines.values())
        return engines[self._turn % len(engines)]


class LeastRequests:
    reason = "the fewest trajectories run there"

    def __call__(self, ledger: Ledger, holding: Holding, tokens: int) -> Engine | None:
        return min(ledger.engines.values(), key=lambda engine: engine.running)


class MostFree:
    """A trajectory stays where its prefix lies; its lease covers all that it can ever need, so there is room for it."""

    reason = "the most KV tokens are free there"

    def __call__(self, ledger: Ledger, holding: Holding, tokens: int) -> Engine | None:
        if holding.engine is not None:
            return (
                holding.engine
                if ledger.missing_pages(holding, holding.engine, tokens) <= holding.engine.free_pages
                else None
            )
        fitting = [
            engine
            for engine in ledger.engines.values()
            if ledger.missing_pages(holding, engine, tokens) <= engine.free_pages
        ]
        return max(fitting, key=lambda engine: engine.free_pages * engine.page_tokens, default=None)
