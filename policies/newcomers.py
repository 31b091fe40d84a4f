"""Trajectories that have not begun: who is begun next.

Of each group the first few, to learn how long it gets; then the expected longest. Where a step ends with the first complete
groups: those of the group that has the fewest left. No new one is overtaken by more than a bound of those that came later:
from then on none but it is begun.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count

from policies.ledger import Group, Holding

_PROBES = 4  # of each group are begun before any group's length is believed
_STALE = 16  # entries of the past for each valid one, and they are cleaned out


class Newcomers:
    """Groups and their members in heaps; entries of the past are dropped when they come to the top."""

    def __init__(
        self,
        groups: Mapping[int, Group],
        final_tokens: Callable[[Holding], float],
        *,
        overtaken: int,
        completes: bool,
    ) -> None:
        """`groups`: the ledger's. `overtaken`: the bound. `completes`: a step ends with the first complete groups."""
        self._ledger_groups = groups
        self._final_tokens = final_tokens
        self._overtaken = overtaken
        self._completes = completes
        self._members: dict[int, list[tuple[float, int, Holding]]] = {}  # by group: heaps, the expected longest first
        self._groups: list[tuple[float, int, int]] = []  # heap: (priority, group, stamp)
        self._stamps: dict[int, int] = {}  # of a group's valid entry in the heap
        self._begun: dict[int, int] = {}  # of each group
        self._arrived: dict[int, int] = {}  # by trajectory: how many had been begun when it came
        self._queue: deque[Holding] = deque()  # in the order in which they came
        self._num_begun = 0
        self._next_stamp = count()

    def __len__(self) -> int:
        return len(self._arrived)

    def __contains__(self, trajectory_id: int) -> bool:
        return trajectory_id in self._arrived

    def add(self, holding: Holding) -> None:
        entry = -self._final_tokens(holding), holding.order, holding
        heapq.heappush(self._members.setdefault(holding.group_id, []), entry)
        self._arrived[holding.trajectory_id] = self._num_begun
        self._queue.append(holding)
        self.rank(holding.group_id)

    def discard(self, trajectory_id: int) -> None:
        self._arrived.pop(trajectory_id, None)

    def rank(self, group_id: int) -> None:
        """Gives the group its present place, where some of it have not begun: its expected length has become another."""
        members = self._members.get(group_id)
        if members:
            stamp = self._stamps[group_id] = next(self._next_stamp)
            heapq.heappush(self._groups, (self._priority(group_id, members[0][-1]), group_id, stamp))
            if len(self._groups) > _STALE * len(self._stamps):
                self._groups = [entry for entry in self._groups if self._stamps.get(entry[1]) == entry[2]]
                heapq.heapify(self._groups)

    def forget(self, group_id: int) -> None:
        """Nobody of it is left."""
        for table in (self._members, self._stamps, self._begun):
            table.pop(group_id, None)

    def begin(self, holding: Holding) -> None:
        group_id = holding.group_id
        del self._arrived[holding.trajectory_id]
        self._num_begun += 1
        self._begun[group_id] = self._begun.get(group_id, 0) + 1
        self.rank(group_id)

    def first(self) -> tuple[Holding | None, bool]:
        """Who is begun next, and whether its time is overdue."""
        if not self._arrived:
            self._queue.clear()
            return None, False
        while self._queue[0].trajectory_id not in self._arrived:
            self._queue.popleft()
        oldest = self._queue[0]
        if self._num_begun - self._arrived[oldest.trajectory_id] >= self._overtaken:
            return oldest, True
        while self._groups:
            _, group_id, stamp = self._groups[0]
            if self._stamps.get(group_id) == stamp:
                members = self._members[group_id]
                while members and members[0][-1].trajectory_id not in self._arrived:
                    heapq.heappop(members)
                if members:
                    return members[0][-1], False
                del self._members[group_id], self._stamps[group_id]
            heapq.heappop(self._groups)
        return None, False

    def _priority(self, group_id: int, first: Holding) -> float:
        """The least is begun first."""
        begun = self._begun.get(group_id, 0)
        if self._completes:  # of those with as many left, the one of which more run
            return self._ledger_groups[group_id].members - begun / (begun + 1)
        return float("-inf") if begun < _PROBES else -self._final_tokens(first)
