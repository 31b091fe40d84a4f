"""What an engine's trajectories will need at their worst moment to come, if they get as long as expected.

All grow by a token at a time and in step, and each frees its pages at its end. So the worst moment is the end of one of
them: when all have grown by r, those with at least r tokens to go hold

    need(r) = sum of (tokens_i + r) over all i with remaining_i >= r

It is kept for the start and for `_BINS` intervals of r up to the response limit, at no less than it comes to within each:
whoever comes, goes or is expected to get longer changes it in one pass over these, however many there are.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

_BINS = 64
_TOGETHER = 8  # more that have changed are counted in one pass


class Forecast:
    """Of one engine. Tokens; shared prompts are counted with every trajectory."""

    def __init__(self, limit: int) -> None:
        """`limit`: new tokens that a trajectory has at most."""
        self.committed = 0.0  # what all would need if all were at their ends at once: at least the worst moment
        self._until = np.arange(_BINS + 1) * float(-(-limit // _BINS))  # where each interval of r ends
        self._since = np.append(-1.0, self._until[:-1])
        self._need = np.zeros(_BINS + 1)
        self._of_each: dict[int, tuple[float, float]] = {}  # by trajectory: tokens, and those to go
        self._counted: dict[int, NDArray[np.float64]] = {}  # its part of `_need`
        self._changed: set[int] = set()  # whose part is another by now

    def put(self, trajectory_id: int, tokens: float, final_tokens: float) -> None:
        self.remove(trajectory_id)
        to_go = final_tokens - tokens if final_tokens > tokens else 0.0
        self._of_each[trajectory_id] = tokens, to_go
        self.committed += tokens + to_go

    def remove(self, trajectory_id: int) -> None:
        before = self._of_each.pop(trajectory_id, None)
        if before is not None:
            self.committed -= before[0] + before[1]
        self._changed.add(trajectory_id)

    def longest(self) -> float:
        """Tokens that the one with the most of them to go is expected to need still."""
        return max(map(itemgetter(1), self._of_each.values()), default=0.0)

    def fits(self, tokens: float, final_tokens: float, room: float) -> bool:
        """Whether with one more trajectory the worst moment needs no more than `room`."""
        if self.committed + final_tokens <= room:
            return True
        self._count()
        return float((self._need + self._part(tokens, final_tokens - tokens)).max()) <= room

    def _count(self) -> None:
        for trajectory_id in self._changed:
            before = self._counted.pop(trajectory_id, None)
            if before is not None:
                self._need -= before
        new = [trajectory_id for trajectory_id in self._changed if trajectory_id in self._of_each]
        self._changed.clear()
        if len(new) > _TOGETHER:
            tokens_N1, to_go_N1 = np.array([self._of_each[trajectory_id] for trajectory_id in new]).T[:, :, None]
            parts = self._part(tokens_N1, to_go_N1)
            self._need += parts.sum(0)
            self._counted.update(zip(new, parts, strict=True))
            return
        for trajectory_id in new:
            part = self._counted[trajectory_id] = self._part(*self._of_each[trajectory_id])
            self._need += part

    def _part(self, tokens: float | NDArray[np.float64], to_go: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """Of one trajectory, [intervals]; of columns of N, [N, intervals]."""
        return (tokens + np.minimum(self._until, to_go)) * (self._since < to_go)
