"""The order in which new trajectories begin.

The first few members of each group begin first, to learn the group's length; then the trajectories
with the longest expected lengths. If a step ends with the first complete groups, members of the group
with the fewest trajectories left begin first. At most `max_overtakes` later trajectories begin before
a waiting trajectory; then only that trajectory may begin.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count

from asterism.policies.arbiter.kv_ledger import KvAccount, PromptGroup

_PROBES_PER_GROUP = 4  # members that begin before the group's expected length counts
_MAX_STALE_RATIO = 16  # limit of heap entries per valid entry; beyond it, stale entries are removed


class StartQueue:
    """Heaps of groups and of their members; stale entries are dropped when they reach the top."""

    def __init__(
        self,
        groups: Mapping[int, PromptGroup],
        estimate_final_tokens: Callable[[KvAccount], float],
        *,
        max_overtakes: int,
        ends_at_first_groups: bool,
    ) -> None:
        """`ends_at_first_groups`: a step ends with its first complete groups."""
        self._ledger_groups = groups
        self._estimate_final_tokens = estimate_final_tokens
        self._max_overtakes = max_overtakes
        self._ends_at_first_groups = ends_at_first_groups
        # Heap of each group's members, the longest expected member first.
        self._members: dict[int, list[tuple[float, int, KvAccount]]] = {}
        self._group_heap: list[tuple[float, int, int]] = []  # heap of (priority, group, stamp)
        self._stamps: dict[int, int] = {}  # stamp of the valid heap entry of each group
        self._num_started_by_group: dict[int, int] = {}
        self._num_started_at_arrival: dict[int, int] = {}  # `_num_started` when each waiting trajectory arrived
        self._queue: deque[KvAccount] = deque()  # in order of arrival
        self._num_started = 0
        self._next_stamp = count()

    def __len__(self) -> int:
        return len(self._num_started_at_arrival)

    def __contains__(self, trajectory_id: int) -> bool:
        return trajectory_id in self._num_started_at_arrival

    def add(self, account: KvAccount) -> None:
        entry = -self._estimate_final_tokens(account), account.arrival, account
        heapq.heappush(self._members.setdefault(account.group_id, []), entry)
        self._num_started_at_arrival[account.trajectory_id] = self._num_started
        self._queue.append(account)
        self.update_rank(account.group_id)

    def discard(self, trajectory_id: int) -> None:
        self._num_started_at_arrival.pop(trajectory_id, None)

    def update_rank(self, group_id: int) -> None:
        """Recompute the group's priority after its expected length or its size changed."""
        members = self._members.get(group_id)
        if members:
            stamp = self._stamps[group_id] = next(self._next_stamp)
            heapq.heappush(self._group_heap, (self._compute_priority(group_id, members[0][-1]), group_id, stamp))
            if len(self._group_heap) > _MAX_STALE_RATIO * len(self._stamps):
                self._group_heap = [entry for entry in self._group_heap if self._stamps.get(entry[1]) == entry[2]]
                heapq.heapify(self._group_heap)

    def remove_group(self, group_id: int) -> None:
        """Remove a group after the end of its last member."""
        for table in (self._members, self._stamps, self._num_started_by_group):
            table.pop(group_id, None)

    def mark_started(self, account: KvAccount) -> None:
        group_id = account.group_id
        del self._num_started_at_arrival[account.trajectory_id]
        self._num_started += 1
        self._num_started_by_group[group_id] = self._num_started_by_group.get(group_id, 0) + 1
        self.update_rank(group_id)

    def peek(self) -> tuple[KvAccount | None, bool]:
        """Return the trajectory to begin next, and whether it is overdue."""
        if not self._num_started_at_arrival:
            self._queue.clear()
            return None, False
        while self._queue[0].trajectory_id not in self._num_started_at_arrival:
            self._queue.popleft()
        oldest = self._queue[0]
        if self._num_started - self._num_started_at_arrival[oldest.trajectory_id] >= self._max_overtakes:
            return oldest, True
        while self._group_heap:
            _, group_id, stamp = self._group_heap[0]
            if self._stamps.get(group_id) == stamp:
                members = self._members[group_id]
                while members and members[0][-1].trajectory_id not in self._num_started_at_arrival:
                    heapq.heappop(members)
                if members:
                    return members[0][-1], False
                del self._members[group_id], self._stamps[group_id]
            heapq.heappop(self._group_heap)
        return None, False

    def _compute_priority(self, group_id: int, first: KvAccount) -> float:
        """Return the group's priority; the group with the lowest value begins first."""
        num_started = self._num_started_by_group.get(group_id, 0)
        if self._ends_at_first_groups:  # fewest members left; on a tie, most members started
            return self._ledger_groups[group_id].members - num_started / (num_started + 1)
        return float("-inf") if num_started < _PROBES_PER_GROUP else -self._estimate_final_tokens(first)
