"""How long turns and trajectories get, learned from the run itself: what a lease should cover, and who will be long.

Lengths are counted in bins, so that an estimate costs the same however many trajectories there were. Half of the weight is
forgotten every `_HALF_LIFE` trajectories: a policy's answers change their length as it learns.

Who ends first is short. So while few have ended beside those under way, these count as survivors: as longer than they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import accumulate

_BINS = 64
_HALF_LIFE = 4096.0  # trajectories
_PRIOR = 1.0  # weight of the prior over a whole distribution: uniform up to the limit
_LEAST_WEIGHT = 1e-12  # of a bin beside a new length's 1: what nobody has seen for long stays possible
_FEW = 0.5  # of those under way; when more have ended, these alone tell the lengths
_GROUPS = 8192  # that are remembered, the newest
_GROUP_PRIOR = 2.0  # siblings that a group's own mean must outweigh


class Histogram:
    """Of lengths in [0, limit]; newer ones count more. Sums over bins are made again when much has changed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._width = -(-limit // _BINS)
        self._weights = [_PRIOR / _BINS] * _BINS
        self._unit = 1.0  # weight of the next length; it grows instead of all others shrinking
        self._under_way = [0] * _BINS
        self._num_added = self._num_under_way = self._num_changes = 0
        self._sum_again_at = 1
        self._sum()

    def went_on(self, before: int | None, now: int | None) -> None:
        """One that has not ended had `before` and has `now` (None: it was not under way, or is no longer)."""
        for tokens, count in ((before, -1), (now, 1)):
            if tokens is not None:
                self._under_way[min(tokens // self._width, _BINS - 1)] += count
                self._num_under_way += count
        if self._few_have_ended:
            self._change()

    def add(self, tokens: int) -> None:
        self._weights[min(tokens // self._width, _BINS - 1)] += self._unit
        self._unit *= 2 ** (1 / _HALF_LIFE)
        if self._unit > 1e12:
            self._weights = [max(weight / self._unit, _LEAST_WEIGHT) for weight in self._weights]
            self._unit = 1.0
        self._num_added += 1
        self._change()

    @property
    def _few_have_ended(self) -> bool:
        return self._num_added < _FEW * self._num_under_way

    def _change(self) -> None:
        self._num_changes += 1
        if self._num_changes >= self._sum_again_at:
            self._sum_again_at = self._num_changes + min(self._num_changes // 50 + 1, 64)
            self._sum()

    def _sum(self) -> None:
        weights = self._with_survivors() if self._few_have_ended else self._weights
        self._up_to = list(accumulate(weights))
        middles = (weight * (number + 0.5) for number, weight in enumerate(weights))
        total = list(accumulate(middles))
        whole, weighted = self._up_to[-1], total[-1]
        self._means = [
            (weighted - total[number] + weights[number] * (number + 0.5))
            / (whole - self._up_to[number] + weights[number])
            * self._width
            for number in range(_BINS)
        ]

    def _with_survivors(self) -> list[float]:
        """Shares by the product limit (Kaplan and Meier 1958): of those that came to a bin, so many ended in it."""
        ended = [weight / self._unit for weight in self._weights]
        came = accumulate(reversed([each + under_way for each, under_way in zip(ended, self._under_way, strict=True)]))
        found: list[float] = []
        left = 1.0
        for each, under_way, all_came in zip(ended, self._under_way, reversed(list(came)), strict=True):
            found.append(left * each / (all_came - under_way))  # nobody knows yet whether these will end in it
            left -= found[-1]
        return found

    @property
    def mean(self) -> float:
        return self._means[0]

    def mean_beyond(self, tokens: int) -> float:
        """The expected length of one that is longer than `tokens`."""
        number = tokens // self._width
        mean = self._means[number if number < _BINS else -1]
        mean = mean if mean > tokens + 1.0 else tokens + 1.0
        return mean if mean < self._limit else float(self._limit)

    def quantile_beyond(self, tokens: int, share: float) -> int:
        """What so many of those that are longer than `tokens` do not exceed: the upper end of a bin."""
        first = min(tokens // self._width, _BINS - 1)
        below = self._up_to[first - 1] if first else 0.0
        number = bisect_left(self._up_to, below + share * (self._up_to[-1] - below), first, _BINS - 1)
        return min(self._limit, (number + 1) * self._width)


class _Group:
    """`tokens`: summed over its members that were begun, what each has come to, or is expected to come to."""

    def __init__(self) -> None:
        self.members = 0
        self.tokens = 0.0


class Lengths:
    """Response lengths of trajectories, and of turns by their number. Only what is told counts."""

    _TURNS = 8  # later ones are counted together

    def __init__(self, response_tokens: int) -> None:
        """`response_tokens`: the limit of a trajectory, beyond its prompt."""
        self.limit = response_tokens
        self._trajectories = Histogram(response_tokens)
        self._turns = [Histogram(response_tokens) for _ in range(self._TURNS)]
        self._groups: OrderedDict[int, _Group] = OrderedDict()

    def turn_ended(self, turn: int, tokens: int) -> None:
        self._turns[min(turn, self._TURNS - 1)].add(tokens)

    def went_on(self, before: int | None, so_far: int) -> None:
        """A trajectory under way had `before` when this was last told of it (None: never)."""
        self._trajectories.went_on(before, so_far)

    def trajectory_ended(self, tokens: int, before: int | None = None) -> None:
        """`before`: as in `went_on`."""
        self._trajectories.went_on(before, None)
        self._trajectories.add(tokens)

    def expect(self, group_id: int, before: float | None, now: float) -> None:
        """A member is expected to come to `now`, where `before` was expected (None: nothing yet). Those that run on count as
        what such a one comes to: else a group would look short until its long ones have ended."""
        group = self._groups.setdefault(group_id, _Group())
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        group.members += before is None
        group.tokens += now - (before or 0.0)

    def alone(self, so_far: int) -> float:
        """The expected length of a trajectory of which only its tokens so far are known."""
        return self._trajectories.mean_beyond(so_far)

    def turn_tokens(self, turn: int, so_far: int, share: float) -> int:
        """What a turn that has `so_far` tokens will have at its end, in so many of the cases."""
        return self._turns[min(turn, self._TURNS - 1)].quantile_beyond(so_far, share)

    def final_tokens(self, group_id: int, so_far: int) -> float:
        """The expected length of a trajectory that has `so_far` response tokens. What it has to go is longer or shorter
        than another's by as much as its siblings are, their mean shrunk to all's."""
        to_go = self._trajectories.mean_beyond(so_far) - so_far
        group = self._groups.get(group_id)
        if group is None:
            return so_far + to_go
        typical = self._trajectories.mean
        siblings = (group.tokens + _GROUP_PRIOR * typical) / (group.members + _GROUP_PRIOR)
        to_go *= siblings / typical
        final = so_far + (to_go if to_go > 1.0 else 1.0)
        return final if final < self.limit else float(self.limit)
