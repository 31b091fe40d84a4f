"""How long turns and trajectories get, learned from the run itself: what a lease should cover, and who will be long.

Lengths are counted in bins, so that an estimate costs the same however many trajectories there were. Half of the weight is
forgotten every `_HALF_LIFE` trajectories: a policy's answers change their length as it learns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from policies.survival import Survival

_BINS = 64
_HALF_LIFE = 4096.0  # trajectories
_PRIOR = 1.0  # weight of the prior over a whole distribution: uniform up to the limit
_LEAST_WEIGHT = 1e-12  # of a bin beside a new length's 1: what nobody has seen for long stays possible
_TURNS = 8  # later ones are counted together
_GROUPS = 8192  # that are remembered, the newest
_GROUP_PRIOR = 2.0  # siblings that a group's own mean must outweigh


class Histogram:
    """Of lengths in [0, limit]; newer ones count more. Sums over bins are made again when they have changed by much."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._width = -(-limit // _BINS)
        self._weights = [_PRIOR / _BINS] * _BINS
        self._unit = 1.0  # weight of the next length; it grows instead of all others shrinking
        self._num_added = 0
        self._sum_again_at = 1
        self._sum()

    def add(self, tokens: int) -> None:
        self._weights[min(tokens // self._width, _BINS - 1)] += self._unit
        self._unit *= 2 ** (1 / _HALF_LIFE)
        if self._unit > 1e12:
            self._weights = [max(weight / self._unit, _LEAST_WEIGHT) for weight in self._weights]
            self._unit = 1.0
        self._num_added += 1
        if self._num_added >= self._sum_again_at:
            self._sum_again_at = self._num_added + min(self._num_added // 50 + 1, 64)
            self._sum()

    def _sum(self) -> None:
        self._up_to = list(accumulate(self._weights))

    def quantile_beyond(self, tokens: int, share: float) -> int:
        """What so many of those that are longer than `tokens` do not exceed: the upper end of a bin."""
        up_to, first = self._up_to, tokens // self._width
        if first >= _BINS:
            return self._limit
        below = up_to[first - 1] if first else 0.0
        number = bisect_left(up_to, below + share * (up_to[-1] - below), first, _BINS - 1)
        end = (number + 1) * self._width
        return end if end < self._limit else self._limit


class _Group:
    """`tokens`: summed over its members that were begun, what each has come to, or is expected to come to."""

    def __init__(self) -> None:
        self.members = 0
        self.tokens = 0.0


class Lengths:
    """Response lengths of trajectories, and of turns by their number. Only what is told counts."""

    def __init__(self, response_tokens: int) -> None:
        """`response_tokens`: the limit of a trajectory, beyond its prompt."""
        self.limit = response_tokens
        self._trajectories = Survival(response_tokens)
        self._turns = [Histogram(response_tokens) for _ in range(_TURNS)]
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    def turn_ended(self, turn: int, tokens: int) -> None:
        self._turns[turn if turn < _TURNS else -1].add(tokens)

    def trajectory_lives(self, before: int, until: int) -> None:
        """See Survival.lives. Response tokens."""
        self._trajectories.lives(before, until)

    def trajectory_ended(self, before: int, now: int) -> None:
        self._trajectories.ended(before, now)

    def expect(self, group_id: int, before: float | None, now: float) -> None:
        """A member is expected to come to `now`, where `before` was expected (None: nothing yet). Those that run on count as
        what such a one comes to: else a group would look short until its long ones have ended."""
        group = self._groups.get(group_id)
        if group is None:
            if before is not None:  # it is too old to be remembered
                return
            group = self._groups[group_id] = _Group()
            if len(self._groups) > _GROUPS:
                self._groups.popitem(last=False)
        if before is None:
            group.members += 1
            group.tokens += now
        else:
            group.tokens += now - before

    def alone(self, so_far: int) -> float:
        """The expected length of a trajectory of which only its tokens so far are known."""
        return self._trajectories.mean_beyond(so_far)

    def turn_tokens(self, turn: int, so_far: int, share: float) -> int:
        """What a turn that has `so_far` tokens will have at its end, in so many of the cases."""
        return self._turns[turn if turn < _TURNS else -1].quantile_beyond(so_far, share)

    def final_tokens(self, group_id: int, so_far: int) -> float:
        """The expected length of a trajectory that has `so_far` response tokens. What it has to go is longer or shorter
        than another's by as much as its siblings are, their mean shrunk to all's."""
        to_go = (self._trajectories.mean_beyond(so_far) - so_far) * self._stretch(group_id)
        return min(so_far + max(to_go, 1.0), float(self.limit))

    def alive(self, group_id: int, so_far: int) -> NDArray[np.float64]:
        """See Survival.alive."""
        return self._trajectories.alive(so_far, self._stretch(group_id))

    def _stretch(self, group_id: int) -> float:
        group = self._groups.get(group_id)
        if group is None:
            return 1.0
        typical = self._trajectories.mean
        return (group.tokens + _GROUP_PRIOR * typical) / (group.members + _GROUP_PRIOR) / typical
