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
3 and 4 must also fit into what the engine's trajectories are expected to need at their worst moment to come.
When nobody is left to begin, one of those that would end last moves to a faster engine, if it ends so much sooner that
computing its cache anew is worth it: one at a time, until that engine has said how fast it is now.
No new one is overtaken by more than `_OVERTAKEN` that came later: from then on none but it is begun.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from itertools import count
from typing import Protocol

from policies.admission import Grant, Preemption
from policies.forecast import Forecast
from policies.ledger import Engine, Holding, Ledger

_COVERED = 0.9  # of the turns end within their first lease
_LEAST_LEASE = 64  # new tokens; a shorter lease is not worth its messages
_MOST_LEASE = 256  # new tokens; a longer one holds room that nobody uses for long
_PROBES = 4  # of each group are begun before any group's length is believed
_MARGIN = 0.95  # of an engine's room may be needed at the worst moment that is expected
_LAST = 0.5  # of the time until the last one ends: who needs more may move to a faster engine
_PREFILLED_IN_A_STEP = 256  # tokens, in the time of a decode step; engines read more
_WORTH = 8.0  # times what it costs must a move bring
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


class Lookahead:
    """Implements policies.admission.Policy."""

    oversells = False

    def __init__(
        self, ledger: Ledger, expected: Expected, *, overtaken: int = _OVERTAKEN, completes: bool = False
    ) -> None:
        """`completes`: more groups are begun than are needed, and the first complete ones are taken."""
        self._ledger = ledger
        self._expected = expected
        self._overtaken = overtaken
        self._completes = completes
        self._forecasts: dict[str, Forecast] = {}
        self._here: dict[str, list[tuple[int, int, int, Holding]]] = {}  # by engine: who waits with a cache there
        self._homeless: list[tuple[int, int, Holding]] = []  # who was begun and has no cache any more
        self._horizons: dict[str, float] = {}  # by engine: seconds until its last trajectory is expected to end
        self._joined: set[str] = set()  # engines to which one has moved since they last reported how fast they are
        self._pushes = count()
        self._entries: dict[int, int] = {}  # of each that waits in a heap: its valid entry's push
        self._new: dict[int, list[tuple[float, int, Holding]]] = {}  # by group: heaps, the expected longest first
        self._groups: list[tuple[float, int, int]] = []  # heap: (priority, group, stamp)
        self._stamps: dict[int, int] = {}  # of a group's valid entry in the heap
        self._begun: dict[int, int] = {}  # of each group
        self._arrived: OrderedDict[int, int] = OrderedDict()  # new ones: how many had been begun when they came
        self._num_begun = 0
        self._unplaced = False  # some without a cache have come since it was last looked where they fit
        self._changed: OrderedDict[str, None] = OrderedDict()

    # ---------------------------------------------------------------- what happens

    def waits(self, holding: Holding) -> None:
        engine = holding.engine
        push = self._entries[holding.trajectory_id] = next(self._pushes)
        if engine is not None:
            heapq.heappush(self._here[engine.name], (not holding.is_extension, holding.order, push, holding))
            self._changed[engine.name] = None
            return
        self._unplaced = True
        if holding.leases:
            heapq.heappush(self._homeless, (holding.order, push, holding))
        else:
            entry = -self._expected.final_tokens(holding), holding.order, holding
            heapq.heappush(self._new.setdefault(holding.group_id, []), entry)
            self._arrived[holding.trajectory_id] = self._num_begun
            self._rank(holding.group_id)

    def withdrawn(self, holding: Holding) -> None:
        """Heaps are cleaned when they are looked at."""
        self._entries.pop(holding.trajectory_id, None)
        self._arrived.pop(holding.trajectory_id, None)

    def measured(self, engine: Engine) -> None:
        self._joined.discard(engine.name)
        if not self._arrived:  # else nobody moves
            self._horizons[engine.name] = self._forecast(engine).longest() * engine.step_s

    def changed(self, engine: Engine) -> None:
        self._forecast(engine)
        self._changed[engine.name] = None

    def leased(self, holding: Holding) -> None:
        assert holding.engine is not None
        forecast = self._forecasts[holding.engine.name]
        # what it was given already, though it has not come so far yet: else that room would be given twice
        forecast.put(holding.trajectory_id, holding.leased_tokens, self._expected.final_tokens(holding))

    def dropped(self, holding: Holding, engine: Engine) -> None:
        forecast = self._forecasts.get(engine.name)
        if forecast is not None:
            forecast.remove(holding.trajectory_id)

    def left(self, engine: Engine) -> None:
        for table in (self._forecasts, self._here, self._changed, self._horizons):
            table.pop(engine.name, None)

    def ended(self, holding: Holding) -> None:
        group_id = holding.group_id
        if group_id not in self._ledger.groups:  # nobody of it is left
            for table in (self._new, self._stamps, self._begun):
                table.pop(group_id, None)
        elif group_id in self._new:
            self._rank(group_id)  # its length has become known

    # ---------------------------------------------------------------- what to do

    def next(self, now: float) -> Grant | Preemption | None:
        while self._changed:
            engine = self._ledger.engines[next(iter(self._changed))]
            decision = self._serve_here(engine, now)
            if decision is not None:
                return decision
            grant = None if self._top_here(engine) is not None else self._begin(engine)
            if grant is not None:
                return grant
            del self._changed[engine.name]
        if self._unplaced:
            grant = self._begin_anywhere()
            if grant is not None:
                return grant
            self._unplaced = False
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
        faster = self._faster(holding, engine, tokens)
        if faster is not None:
            return Grant(holding, faster, tokens, f"it would be the last to end, and {faster.name} is faster")
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

    def _faster(self, holding: Holding, engine: Engine, tokens: int) -> Engine | None:
        """Where one of those that would end last ends so much sooner that computing its cache anew is worth it."""
        to_go = self._expected.final_tokens(holding) - holding.tokens
        if self._arrived or not engine.step_s or to_go * engine.step_s < _LAST * self._horizon_s():
            return None
        best = min(self._ledger.engines.values(), key=lambda each: each.step_s or engine.step_s)
        if best.name in self._joined:
            return None
        gain_s = to_go * (engine.step_s - best.step_s)
        cost_s = _WORTH * holding.tokens / _PREFILLED_IN_A_STEP * engine.step_s
        if not best.step_s or gain_s <= cost_s or best is engine:
            return None
        if self._ledger.missing_pages(holding, best, tokens) > best.room(holding):
            return None
        self._joined.add(best.name)
        return best

    def _horizon_s(self) -> float:
        """When the last of all is expected to end, from now on."""
        return max(self._horizons.values(), default=0.0)

    def _waiting_here(self, engine: Engine) -> list[Holding]:
        return [each for _, _, push, each in self._here[engine.name] if self._entries.get(each.trajectory_id) == push]

    def _parked_in_the_way(self, holding: Holding, engine: Engine, tokens: int) -> tuple[Holding, ...] | None:
        """Whose caches must go for such a lease; None where even all of them are not enough."""
        missing = self._ledger.missing_pages(holding, engine, tokens) - engine.room(holding)
        if missing <= 0:
            return ()
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
        """On the engine whose trajectories will need least, or on one that has none."""
        engines = [engine for engine in self._ledger.engines.values() if self._top_here(engine) is None]
        if not engines:
            return None
        most = max(engines, key=self._uncommitted)
        grant = self._begin(most)
        if grant is not None or not most.holdings:
            return grant
        empty = next((engine for engine in engines if not engine.holdings), None)
        return None if empty is None else self._begin(empty)

    def _uncommitted(self, engine: Engine) -> float:
        return engine.usable_pages * engine.page_tokens - self._forecasts[engine.name].committed

    def _begin(self, engine: Engine) -> Grant | None:
        holding, overdue = self._first_without()
        if holding is None:
            return None
        tokens = self._lease_tokens(holding)
        if self._ledger.missing_pages(holding, engine, tokens) > engine.room(holding):
            return None
        final = self._expected.final_tokens(holding)
        room = engine.usable_pages * engine.page_tokens * _MARGIN
        if not overdue and engine.holdings and not self._forecasts[engine.name].fits(holding.tokens, final, room):
            return None
        if holding.trajectory_id in self._arrived:
            self._take(holding)
            return Grant(holding, engine, tokens, "overdue" if overdue else "will be among the longest")
        return Grant(holding, engine, tokens, "there is room to compute its cache anew")

    def _first_without(self) -> tuple[Holding | None, bool]:
        while self._homeless:
            _, push, holding = self._homeless[0]
            if self._entries.get(holding.trajectory_id) == push:
                return holding, False
            heapq.heappop(self._homeless)
        if self._arrived:
            oldest = next(iter(self._arrived))
            if self._num_begun - self._arrived[oldest] >= self._overtaken:
                return self._ledger.holdings[oldest], True
        while self._groups:
            _, group_id, stamp = self._groups[0]
            if self._stamps.get(group_id) == stamp:
                waiting = self._new[group_id]
                while waiting and waiting[0][-1].trajectory_id not in self._arrived:
                    heapq.heappop(waiting)
                if waiting:
                    return waiting[0][-1], False
                del self._new[group_id], self._stamps[group_id]
            heapq.heappop(self._groups)
        return None, False

    def _take(self, holding: Holding) -> None:
        group_id = holding.group_id
        del self._arrived[holding.trajectory_id]
        self._num_begun += 1
        self._begun[group_id] = self._begun.get(group_id, 0) + 1
        self._rank(group_id)

    def _rank(self, group_id: int) -> None:
        """Gives the group its present place among those that have members to begin."""
        waiting = self._new.get(group_id)
        if not waiting:
            return
        stamp = self._stamps[group_id] = next(self._pushes)
        heapq.heappush(self._groups, (self._priority(group_id, waiting[0][-1]), group_id, stamp))

    def _priority(self, group_id: int, first: Holding) -> float:
        """The least is begun first."""
        begun = self._begun.get(group_id, 0)
        if self._completes:  # of those with as many left, the one of which more run
            return self._ledger.groups[group_id].members - begun / (begun + 1)
        return float("-inf") if begun < _PROBES else -self._expected.final_tokens(first)

    def _forecast(self, engine: Engine) -> Forecast:
        forecast = self._forecasts.get(engine.name)
        if forecast is None:
            self._here[engine.name] = []
            forecast = self._forecasts[engine.name] = Forecast(self._expected.limit)
        return forecast
