"""kv_lookahead: leases by expected lengths, the longest first, nothing evicted and little computed again.

Order in which an engine's room is given away, whenever some is free:
    1. turns there that their lease has ended, the oldest trajectory first: they hold a cache and decode nothing
    2. trajectories that a tool has answered, and whose cache is there, the oldest first
    3. trajectories whose cache was given up, wherever there is room, the oldest first
    4. new ones: of each group the first few, to learn how long it gets; then the expected longest. Where a step ends with the
       first complete groups: those of the group first that has the fewest left

Where 1 or 2 find no room: the caches of parked trajectories go, those parked longest first, for a tool that is slow
already is likely to stay so; then, if nobody runs there, or they have waited for longer than it takes to compute it anew,
the cache of the youngest that waits there. The oldest never loses its cache to a younger one, so each comes to its end.
3 and 4 must also fit into what the engine's trajectories are expected to need at their worst moment to come (policies.forecast).
They go to an engine that has few of their siblings already, who share a prompt; else to the one whose trajectories need
least; else to any. New ones wait until all that ask at the same time are known.
When nobody is left to begin, trajectories move so that all engines end together (policies.balance).
No new one is overtaken by more than `_OVERTAKEN` that came later: from then on none but it is begun (policies.newcomers).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.admission import Grant, Preemption
from policies.balance import Balance
from policies.forecast import Forecast
from policies.ledger import Engine, Holding, Ledger
from policies.newcomers import Newcomers

_COVERED = 0.9  # of the turns end within their first lease
_LEAST_LEASE = 64  # new tokens; a shorter lease is not worth its messages
_MOST_LEASE = 256  # new tokens; a longer one holds room that nobody uses for long
_SIBLINGS = 4  # of a group go to one engine, where others have room too
_PATIENCE_S = 1.0  # that a trajectory with a cache waits before a younger one loses its own
_OVERTAKEN = 65_536
_NO_ROOM = "an older one needs its room"


class Expected(Protocol):
    """How long things get: learned (policies.lengths), or known to an oracle. `limit`: of a trajectory's new tokens."""

    limit: int

    def turn_tokens(self, holding: Holding, share: float) -> int:
        """New tokens in all that its present turn will have, in so many of the cases."""
        ...

    def final_tokens(self, holding: Holding) -> float:
        """Its tokens at its end, prompt included."""
        ...

    def alive(self, holding: Holding) -> NDArray[np.float64]:
        """The probability that it goes on behind the beginning of each of the forecast's intervals from here."""
        ...


class Lookahead:
    """Implements policies.admission.Policy."""

    oversells = False
    gathers = True

    def __init__(
        self, ledger: Ledger, expected: Expected, *, overtaken: int = _OVERTAKEN, completes: bool = False
    ) -> None:
        """`completes`: more groups are begun than are needed, and the first complete ones are taken."""
        self._ledger = ledger
        self._expected = expected
        self._forecasts: dict[str, Forecast] = {}
        self._here: dict[str, list[tuple[int, int, int, Holding]]] = {}  # by engine: who waits with a cache there
        self._homeless: list[tuple[int, int, Holding]] = []  # who was begun and has no cache any more
        self._balance = Balance()
        self._pushes = count()
        self._entries: dict[int, int] = {}  # of each that waits in a heap: its valid entry's push
        self._new = Newcomers(ledger.groups, expected.final_tokens, overtaken=overtaken, completes=completes)
        self._unplaced = False  # some without a cache have come since it was last looked where they fit
        self._changed: OrderedDict[str, None] = OrderedDict()  # engines, since those with a cache there were looked at
        self._roomier: dict[str, None] = {}  # engines, since those without were

    # ---------------------------------------------------------------- what happens

    def waits(self, holding: Holding) -> None:
        engine = holding.engine
        if holding.leases:
            self._new.rank(holding.group_id)  # by how far it has come
        push = self._entries[holding.trajectory_id] = next(self._pushes)
        if engine is not None:
            heapq.heappush(self._here[engine.name], (not holding.is_extension, holding.order, push, holding))
            self._changed[engine.name] = None
            return
        self._unplaced = True
        if holding.leases:
            heapq.heappush(self._homeless, (holding.order, push, holding))
        else:
            self._new.add(holding)

    def withdrawn(self, holding: Holding) -> None:
        """Heaps are cleaned when they are looked at."""
        self._entries.pop(holding.trajectory_id, None)
        self._new.discard(holding.trajectory_id)

    def measured(self, engine: Engine) -> None:
        self._balance.measured(engine, self._forecast(engine))

    def changed(self, engine: Engine) -> None:
        self._forecast(engine)
        self._changed[engine.name] = None

    def leased(self, holding: Holding) -> None:
        assert holding.engine is not None
        forecast = self._forecasts[holding.engine.name]
        final, alive = self._expected.final_tokens(holding), partial(self._expected.alive, holding)
        forecast.put(holding.trajectory_id, holding.tokens, holding.leased_tokens, final, alive)

    def dropped(self, holding: Holding, engine: Engine) -> None:
        forecast = self._forecasts.get(engine.name)
        if forecast is not None:
            forecast.remove(holding.trajectory_id)

    def left(self, engine: Engine) -> None:
        self._balance.left(engine)
        for table in (self._forecasts, self._here, self._changed, self._roomier):
            table.pop(engine.name, None)

    def ended(self, holding: Holding) -> None:
        if holding.group_id in self._ledger.groups:
            self._new.rank(holding.group_id)
        else:
            self._new.forget(holding.group_id)

    # ---------------------------------------------------------------- what to do

    def next(self, now: float) -> Grant | Preemption | None:
        while self._changed:
            engine = self._ledger.engines[next(iter(self._changed))]
            decision = self._serve_here(engine, now)
            if decision is not None:
                return decision
            del self._changed[engine.name]
            self._roomier[engine.name] = None
        if self._unplaced or self._roomier:
            grant = self._begin_anywhere()
            if grant is not None:
                return grant
            self._unplaced = False
            self._roomier.clear()
        return None

    def why(self, holding: Holding) -> str:
        if not self._ledger.engines:
            return "no engine has joined"
        if holding.engine is not None:
            return f"{holding.engine.name} holds its cache, and has {holding.engine.room(holding)} free pages"
        return "no engine can hold it together with what its trajectories will need"

    # ---------------------------------------------------------------- those with a cache

    def _top_here(self, engine: Engine) -> Holding | None:
        heap = self._here[engine.name]
        while heap:
            _, _, push, holding = heap[0]
            if self._entries.get(holding.trajectory_id) == push:
                return holding
            heapq.heappop(heap)
        return None

    def _serve_here(self, engine: Engine, now: float) -> Grant | Preemption | None:
        holding = self._top_here(engine)
        if holding is None:
            return None
        tokens = self._lease_tokens(holding)
        better = self._better(holding, engine, tokens)
        if better is not None:
            return Grant(holding, better, tokens, f"{engine.name} would end last, and {better.name} first")
        reason = "goes on with its turn" if holding.is_extension else "its cache is there"
        drop = self._parked_in_the_way(holding, engine, tokens)
        if drop is not None:
            return Grant(holding, engine, tokens, reason, drop)
        shorter = self._what_fits(holding, engine)
        if shorter is not None:
            return Grant(holding, engine, shorter, f"{reason}, as far as there is room")
        least = min(tokens, holding.tokens + _LEAST_LEASE)
        drop = self._parked_in_the_way(holding, engine, least)
        if drop is not None:
            return Grant(holding, engine, least, f"{reason}, as far as there is room", drop)
        if engine.running and now - holding.since < _PATIENCE_S:
            return None
        waiting = self._waiting_here(engine)
        return Preemption(max(waiting, key=lambda each: each.order), _NO_ROOM) if len(waiting) > 1 else None

    def _better(self, holding: Holding, engine: Engine, tokens: int) -> Engine | None:
        """The engine to which it moves, so that all end together."""
        if self._first_without()[0] is not None:
            return None
        to_go = self._expected.final_tokens(holding) - holding.tokens
        name = self._balance.better(engine.name, holding.tokens, to_go)
        if name is None:
            return None
        better = self._ledger.engines[name]
        if self._ledger.missing_pages(holding, better, tokens) > better.room(holding):
            return None
        self._balance.moved(engine.name, name, holding.tokens, to_go)
        return better

    def _waiting_here(self, engine: Engine) -> list[Holding]:
        return [each for _, _, push, each in self._here[engine.name] if self._entries.get(each.trajectory_id) == push]

    def _parked_in_the_way(self, holding: Holding, engine: Engine, tokens: int) -> tuple[Holding, ...] | None:
        """Whose caches must go for such a lease; None where even all of them are not enough."""
        missing = self._ledger.missing_pages(holding, engine, tokens)
        if missing <= engine.room(holding):
            return ()
        missing -= engine.left_for(holding)
        drop: list[Holding] = []
        for parked in engine.parked.values():
            drop.append(parked)
            missing -= parked.pages
            if missing <= 0:
                return tuple(drop)
        return None

    def _what_fits(self, holding: Holding, engine: Engine) -> int | None:
        """A lease that ends with the room, if that is worth it; alone on its engine, whatever is left."""
        held = holding.pages + holding.shared_pages(engine)
        most = holding.tokens + holding.request.max_new_tokens
        tokens = min((held + engine.room(holding)) * engine.page_tokens, most)
        worth = 1 if len(engine.holdings) == 1 else _LEAST_LEASE
        return tokens if tokens >= holding.tokens + worth else None

    def _lease_tokens(self, holding: Holding) -> int:
        request = holding.request
        so_far = holding.tokens - holding.turn_began_at
        new = min(self._expected.turn_tokens(holding, _COVERED) - so_far, _MOST_LEASE)
        return holding.tokens + min(request.max_new_tokens, max(new, _LEAST_LEASE))

    # ---------------------------------------------------------------- those without

    def _begin_anywhere(self) -> Grant | None:
        first, overdue = self._first_without()
        if first is None:
            return None
        for engine in self._engines_for(first):
            grant = self._begin(first, engine, overdue=overdue)
            if grant is not None:
                return grant
        return None

    def _engines_for(self, holding: Holding) -> Iterator[Engine]:
        """Where it may be begun, the best first: none where somebody waits with a cache."""
        engines = [engine for engine in self._ledger.engines.values() if self._top_here(engine) is None]
        if not engines:
            return
        roomiest = max(engines, key=self._uncommitted)
        group, enough = holding.group_id, self._uncommitted(roomiest) - _SIBLINGS * self._expected.limit
        for engine in engines:
            if 0 < engine.groups.get(group, 0) < _SIBLINGS and self._uncommitted(engine) > enough:
                yield engine
        yield roomiest
        others = (engine for engine in engines if engine is not roomiest)
        roomier = [engine for engine in others if engine.name in self._roomier or not engine.holdings]
        yield from sorted(roomier, key=self._uncommitted, reverse=True)

    def _uncommitted(self, engine: Engine) -> float:
        return engine.usable_pages * engine.page_tokens - self._forecast(engine).committed

    def _begin(self, holding: Holding, engine: Engine, *, overdue: bool) -> Grant | None:
        tokens = self._lease_tokens(holding)
        if self._ledger.missing_pages(holding, engine, tokens) > engine.room(holding):
            return None
        room = engine.usable_pages * engine.page_tokens
        fits = self._forecast(engine).fits
        if not overdue and engine.holdings and not fits(holding.tokens, self._expected.alive(holding), room):
            return None
        if holding.trajectory_id in self._new:
            self._new.begin(holding)
            return Grant(holding, engine, tokens, "overdue" if overdue else "will be among the longest")
        return Grant(holding, engine, tokens, "there is room to compute its cache anew")

    def _first_without(self) -> tuple[Holding | None, bool]:
        while self._homeless:
            _, push, holding = self._homeless[0]
            if self._entries.get(holding.trajectory_id) == push:
                return holding, False
            heapq.heappop(self._homeless)
        return self._new.first()

    def _forecast(self, engine: Engine) -> Forecast:
        forecast = self._forecasts.get(engine.name)
        if forecast is None:
            self._here[engine.name] = []
            forecast = self._forecasts[engine.name] = Forecast(self._expected.limit)
        return forecast
