"""Length statistics of turns and trajectories, learned from the run.

Bins count the lengths, so that the cost of an estimate does not grow with the run. Weights halve
every `_HALF_LIFE` trajectories, because response lengths change as the policy learns.
"""

from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from asterism.policies.arbiter.kaplan_meier import KaplanMeierEstimator

_BINS = 64
_HALF_LIFE = 4096.0  # trajectories
_PRIOR_WEIGHT = 1.0  # total weight of the prior, which is uniform up to the limit
_MIN_WEIGHT = 1e-12  # least weight of a bin, relative to the weight 1 of a new length: old lengths stay possible
_MAX_TURN_HISTOGRAMS = 8  # later turns share the last histogram
_MAX_GROUPS = 8192  # number of newest groups to keep
_GROUP_PRIOR_MEMBERS = 2.0  # weight of the typical length in a group's mean, as a number of members


class LengthHistogram:
    """A histogram of lengths in [0, limit]; newer lengths weigh more. Quantiles lag behind by a few additions."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._width = -(-limit // _BINS)
        self._weights = [_PRIOR_WEIGHT / _BINS] * _BINS
        self._unit_weight = 1.0  # weight of the next length; it grows, so that older weights need no update
        self._num_added = 0
        self._next_sum_at = 1
        self._update_cumulative()

    def add(self, tokens: int) -> None:
        self._weights[min(tokens // self._width, _BINS - 1)] += self._unit_weight
        self._unit_weight *= 2 ** (1 / _HALF_LIFE)
        if self._unit_weight > 1e12:
            self._weights = [max(weight / self._unit_weight, _MIN_WEIGHT) for weight in self._weights]
            self._unit_weight = 1.0
        self._num_added += 1
        if self._num_added >= self._next_sum_at:
            self._next_sum_at = self._num_added + min(self._num_added // 50 + 1, 64)
            self._update_cumulative()

    def _update_cumulative(self) -> None:
        self._cumulative = list(accumulate(self._weights))

    def estimate_quantile_beyond(self, tokens: int, quantile: float) -> int:
        """Return the `quantile` of the lengths above `tokens`, rounded up to the end of a bin."""
        cumulative, first = self._cumulative, tokens // self._width
        if first >= _BINS:
            return self._limit
        below = cumulative[first - 1] if first else 0.0
        number = bisect_left(cumulative, below + quantile * (cumulative[-1] - below), first, _BINS - 1)
        end = (number + 1) * self._width
        return end if end < self._limit else self._limit


class _GroupLengths:
    def __init__(self) -> None:
        self.members = 0  # members that have begun
        self.tokens = 0.0  # sum of the members' final lengths, with expected lengths for running members


class LengthStats:
    """Response lengths of trajectories, and of turns by turn number."""

    def __init__(self, response_tokens: int) -> None:
        """`response_tokens`: the length limit of a trajectory, without its prompt."""
        self.limit = response_tokens
        self.survival = KaplanMeierEstimator(response_tokens)  # over all groups
        self._turns = [LengthHistogram(response_tokens) for _ in range(_MAX_TURN_HISTOGRAMS)]
        self._groups: OrderedDict[int, _GroupLengths] = OrderedDict()

    def add_turn(self, turn: int, tokens: int) -> None:
        self._turns[turn if turn < _MAX_TURN_HISTOGRAMS else -1].add(tokens)

    def update_expected_tokens(self, group_id: int, previous_tokens: float | None, expected_tokens: float) -> None:
        """Change the expected length of a group's member. `previous_tokens` is None for a new member.

        Running members count with their expected lengths: a mean over finished members alone would be
        too short until the group's long members end.
        """
        group = self._groups.get(group_id)
        if group is None:
            if previous_tokens is not None:  # a member of a group that was dropped as too old
                return
            group = self._groups[group_id] = _GroupLengths()
            if len(self._groups) > _MAX_GROUPS:
                self._groups.popitem(last=False)
        if previous_tokens is None:
            group.members += 1
            group.tokens += expected_tokens
        else:
            group.tokens += expected_tokens - previous_tokens

    def estimate_turn_tokens(self, turn: int, tokens: int, quantile: float) -> int:
        """Return the `quantile` of the final length of a turn that has `tokens` tokens now."""
        return self._turns[turn if turn < _MAX_TURN_HISTOGRAMS else -1].estimate_quantile_beyond(tokens, quantile)

    def estimate_final_tokens(self, group_id: int, tokens: int) -> float:
        """Return the expected final length after `tokens` tokens; the group's factor scales the remainder."""
        remaining_tokens = (self.survival.compute_mean_beyond(tokens) - tokens) * self._compute_group_factor(group_id)
        return min(tokens + max(remaining_tokens, 1.0), float(self.limit))

    def survival_curve(self, group_id: int, tokens: int) -> NDArray[np.float64]:
        """Return KaplanMeierEstimator.survival_curve with the group's factor."""
        return self.survival.survival_curve(tokens, self._compute_group_factor(group_id))

    def _compute_group_factor(self, group_id: int) -> float:
        """Return the group's mean length, shrunk towards the typical length, divided by the typical length."""
        group = self._groups.get(group_id)
        if group is None:
            return 1.0
        typical = self.survival.mean
        return (group.tokens + _GROUP_PRIOR_MEMBERS * typical) / (group.members + _GROUP_PRIOR_MEMBERS) / typical
