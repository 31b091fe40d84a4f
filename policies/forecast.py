"""What an engine's trajectories will need at their worst moment to come, in expectation.

All grow by a token at a time and in step, and each frees its pages at its end. So when all have grown by r they hold

    need(r) = sum of (tokens_i + r) * P(remaining_i >= r) over all i

It is kept for now and for `BINS` intervals of r up to the response limit, at no less than it comes to within each: whoever
comes, goes or is expected to get longer changes it in one pass over these, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from policies.survival import BINS

Alive = Callable[[], NDArray[np.float64]]


def begins(limit: int) -> NDArray[np.float64]:
    """Where each interval of r begins, [BINS]."""
    return np.arange(BINS, dtype=np.float64) * -(-limit // BINS)


class Forecast:
    """Of one engine. Tokens; shared prompts are counted with every trajectory."""

    def __init__(self, limit: int) -> None:
        """`limit`: new tokens that a trajectory has at most."""
        self.committed = 0.0  # what all would need if all were at their expected ends at once
        self.reads = 0.0  # cached tokens that all their steps to come read
        self._until = np.append(0.0, begins(limit) + -(-limit // BINS))  # where now and each interval end
        self._need = np.zeros(BINS + 1)
        self._tokens: dict[int, float] = {}  # by trajectory
        self._to_go: dict[int, float] = {}
        self._leased: dict[int, float] = {}
        self._alive: dict[int, Alive] = {}
        self._counted: dict[int, NDArray[np.float64]] = {}  # its part of `_need`
        self._changed: set[int] = set()  # whose part is another by now

    def put(self, trajectory_id: int, tokens: float, leased: float, final_tokens: float, alive: Alive) -> None:
        """`leased`: tokens that are its own already, though it has not come so far. `alive`: says, when it is counted, the
        probability that it goes on behind the beginning of each interval, [BINS]."""
        self.remove(trajectory_id)
        to_go = final_tokens - tokens if final_tokens > tokens else 0.0
        self._tokens[trajectory_id], self._to_go[trajectory_id] = tokens, to_go
        self._leased[trajectory_id], self._alive[trajectory_id] = leased, alive
        self.committed += tokens + to_go
        self.reads += reads(tokens, to_go)
        self._changed.add(trajectory_id)

    def remove(self, trajectory_id: int) -> None:
        tokens = self._tokens.pop(trajectory_id, None)
        if tokens is not None:
            to_go = self._to_go.pop(trajectory_id)
            self.committed -= tokens + to_go
            self.reads -= reads(tokens, to_go)
            del self._leased[trajectory_id], self._alive[trajectory_id]
        if trajectory_id in self._counted:
            self._changed.add(trajectory_id)
        else:
            self._changed.discard(trajectory_id)

    def longest(self) -> float:
        """Tokens that the one with the most of them to go is expected to need still."""
        return max(self._to_go.values(), default=0.0)

    def fits(self, tokens: float, alive: NDArray[np.float64], room: float) -> bool:
        """Whether with one more trajectory the worst moment needs no more than `room`."""
        self._count()
        need = self._need + _part(self._until + tokens, alive)
        return bool(need.max() <= room)

    def _count(self) -> None:
        for trajectory_id in self._changed:
            before = self._counted.pop(trajectory_id, None)
            if before is not None:
                self._need -= before
        new = [trajectory_id for trajectory_id in self._changed if trajectory_id in self._tokens]
        self._changed.clear()
        if not new:
            return
        tokens_N1 = np.array([[self._tokens[trajectory_id]] for trajectory_id in new])
        leased_N1 = np.array([[self._leased[trajectory_id]] for trajectory_id in new])
        alive = np.array([self._alive[trajectory_id]() for trajectory_id in new])
        parts = _part(np.maximum(self._until + tokens_N1, leased_N1), alive)
        self._need += parts.sum(0)
        self._counted.update(zip(new, parts, strict=True))


def _part(tokens: NDArray[np.float64], alive: NDArray[np.float64]) -> NDArray[np.float64]:
    """What trajectories need with so many tokens now and within each interval, [..., 1 + BINS]."""
    part = tokens.copy()
    part[..., 1:] *= alive
    return part


def reads(tokens: float, to_go: float) -> float:
    """Cached tokens that so many decode steps read behind `tokens`."""
    return (tokens + to_go / 2) * to_go
