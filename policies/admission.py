"""The seam between the arbiter and its policies, and the simple ones: where a request goes, and whether it waits.

    static          an engine for each group, in turn, whatever happens: rollouts are divided up front (the report's baseline)
    round_robin     an engine for each request, in turn
    least_requests  the engine with the fewest trajectories that run
    kv              first come, first served, to the engine with the most free KV tokens; the lease is the worst case, so
                    that nothing is ever evicted, and kept to the end: who has it waits for nobody (the report's scheduler)
    kv_lookahead    policies.lookahead

The first three grant whatever is asked for at once: engines overflow, and evict and compute again by themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import Protocol

import msgspec

from policies.ledger import Engine, Holding, Ledger


class Grant(msgspec.Struct, frozen=True):
    """Lease `tokens` in all to the holding there, after what is in `drop` has lost its cache."""

    holding: Holding
    engine: Engine
    tokens: int
    reason: str
    drop: tuple[Holding, ...] = ()


class Preemption(msgspec.Struct, frozen=True):
    """It waits in the middle of a turn, and loses its cache for others."""

    holding: Holding
    reason: str


class Policy(Protocol):
    """Told of everything that happens; asked for the next decision until it has none. Holdings are the ledger's."""

    oversells: bool
    gathers: bool
    """Whether new ones wait until all that ask at the same time are known."""

    def waits(self, holding: Holding) -> None:
        """It has asked, or has lost what it had while it waited."""
        ...

    def withdrawn(self, holding: Holding) -> None:
        """It waited, and does no longer: it was granted, or has ended."""
        ...

    def measured(self, engine: Engine) -> None:
        """It has reported its load."""
        ...

    def changed(self, engine: Engine) -> None:
        """It has joined, or pages there may have become free."""
        ...

    def leased(self, holding: Holding) -> None:
        """It runs now."""
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
    """First come, first served: the first waits until `choose` finds it an engine. The lease is the worst case.

    Who has a cache goes ahead of those without: they may wait for the room that it holds.
    """

    gathers = False

    def __init__(self, ledger: Ledger, choose: Chooser, *, oversells: bool) -> None:
        self.oversells = oversells
        self._ledger = ledger
        self._choose = choose
        self._returning: OrderedDict[int, Holding] = OrderedDict()
        self._queue: OrderedDict[int, Holding] = OrderedDict()

    def waits(self, holding: Holding) -> None:
        self._returning.pop(holding.trajectory_id, None)  # its engine may have left
        queue = self._queue if holding.engine is None else self._returning
        queue[holding.trajectory_id] = holding

    def withdrawn(self, holding: Holding) -> None:
        self._returning.pop(holding.trajectory_id, None)
        self._queue.pop(holding.trajectory_id, None)

    def measured(self, engine: Engine) -> None: ...

    def changed(self, engine: Engine) -> None: ...

    def leased(self, holding: Holding) -> None: ...

    def dropped(self, holding: Holding, engine: Engine) -> None: ...

    def ended(self, holding: Holding) -> None: ...

    def left(self, engine: Engine) -> None: ...

    def next(self, now: float) -> Grant | Preemption | None:
        holding = next(chain(self._returning.values(), self._queue.values()), None)
        if holding is None or not self._ledger.engines:
            return None
        tokens = holding.tokens + holding.request.max_new_tokens
        engine = self._choose(self._ledger, holding, tokens)
        return None if engine is None else Grant(holding, engine, tokens, self._choose.reason)

    def why(self, holding: Holding) -> str:
        if not self._ledger.engines:
            return "no engine has joined"
        before = len(self._returning) + (len(self._queue) if holding.engine is None else 0) - 1
        return f"no engine has room for {'it' if before == 0 else f'the first of {before} before it'}"


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
        engines = ledger.engines.values() if holding.engine is None else (holding.engine,)
        fitting = [
            engine for engine in engines if ledger.missing_pages(holding, engine, tokens) <= engine.room(holding)
        ]
        return max(fitting, key=lambda engine: engine.free_pages * engine.page_tokens, default=None)
