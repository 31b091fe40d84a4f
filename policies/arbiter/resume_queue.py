"""The queue of started trajectories that wait for a lease.

Each engine has a heap of the trajectories that it caches; evicted trajectories have a heap of their own.

The heaps delete lazily: an entry that a later push or a withdrawal made stale is dropped when it
reaches the top.
"""

import heapq
from itertools import count
from typing import Any

from asterism.policies.arbiter.kv_ledger import KvAccount


class ResumeQueue:
    def __init__(self) -> None:
        # Heaps by engine: extensions of a turn first, then the oldest trajectory.
        self._cached: dict[str, list[tuple[int, int, int, KvAccount]]] = {}
        self._evicted: list[tuple[int, int, KvAccount]] = []
        self._valid_pushes: dict[int, int] = {}  # number of the valid entry of each trajectory
        self._push_numbers = count()

    def push(self, account: KvAccount) -> None:
        number = self._valid_pushes[account.trajectory_id] = next(self._push_numbers)
        if account.engine is None:
            heapq.heappush(self._evicted, (account.arrival, number, account))
        else:
            entry = (not account.is_extension, account.arrival, number, account)
            heapq.heappush(self._cached.setdefault(account.engine.name, []), entry)

    def discard(self, trajectory_id: int) -> None:
        self._valid_pushes.pop(trajectory_id, None)

    def remove_engine(self, engine: str) -> None:
        self._cached.pop(engine, None)

    def peek_cached(self, engine: str) -> KvAccount | None:
        return self._peek(self._cached.get(engine, []))

    def list_cached(self, engine: str) -> list[KvAccount]:
        return [
            account
            for _, _, number, account in self._cached.get(engine, ())
            if self._valid_pushes.get(account.trajectory_id) == number
        ]

    def peek_evicted(self) -> KvAccount | None:
        """Return the oldest trajectory without a cache."""
        return self._peek(self._evicted)

    def _peek(self, heap: list[Any]) -> KvAccount | None:
        """Return the first account whose push is valid; remove the entries before it."""
        while heap:
            *_, number, account = heap[0]
            if self._valid_pushes.get(account.trajectory_id) == number:
                return account
            heapq.heappop(heap)
        return None
