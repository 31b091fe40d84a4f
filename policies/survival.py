"""How long trajectories get, by Kaplan and Meier's estimator: those that still run count as well as those that have ended.

(Nonparametric Estimation from Incomplete Observations, JASA 1958.) At each age, the share of those that came so far and ended
there. Lengths of the ended alone would be too short for as long as the long ones run. Newer trajectories count more: half of
the weight is forgotten every `_HALF_LIFE`, for a policy's answers change their length as it learns. One weighs what a new one
does when it ends, and as long as it runs.
"""

from __future__ import annotations

from math import log2

import numpy as np
from numpy.typing import NDArray

BINS = 64
_HALF_LIFE = 4096.0  # trajectories
_PRIOR = 4.0  # trajectories whose lengths are uniform up to the limit
_SUM_AFTER = 32  # that have been told
_LEAST_WEIGHT = 1e-12  # of a prior's beside a new one's 1
_MOST_HAZARD = 1 - 1e-4  # some go on behind any age: else nothing could be said of one that does
_STRETCHES = 8  # that are told apart, between a length and its double


class Survival:
    """Lengths in [0, limit], in `BINS` equal intervals."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._width = -(-limit // BINS)
        self._prior_exposed = _PRIOR * (1 - np.arange(BINS) / BINS)
        self._exposed = self._prior_exposed.copy()  # by interval: the weight of the ended that began it
        self._ended = [_PRIOR / BINS] * BINS  # and of those that ended in it
        self._living = np.zeros(BINS, np.int64)  # those that are taken to live through it
        self._unit = 1.0  # weight of the next one; it grows instead of all others shrinking
        self._num_told = 0
        self._since = np.arange(BINS) * float(self._width)
        self._rows: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._sum()

    def lives(self, before: int, until: int) -> None:
        """One that was taken to live until it has `before` tokens is taken to live until `until`.

        Said ahead, for ends are heard of at once: else those that go on would be missing beside them.
        """
        self._living[before // self._width : until // self._width] += 1
        self._tell()

    def ended(self, before: int, now: int) -> None:
        """One that was taken to live until it has `before` tokens has ended with `now`."""
        last = min(now // self._width, BINS - 1)
        self._living[: before // self._width] -= 1
        self._exposed[: last + 1] += self._unit
        self._ended[last] += self._unit
        self._unit *= 2 ** (1 / _HALF_LIFE)
        if self._unit > 1e12:
            self._rescale()
        self._tell()

    @property
    def mean(self) -> float:
        return self._to_go[0]

    def mean_beyond(self, tokens: int) -> float:
        """The expected length of one that has so many tokens and has not ended: at most the limit."""
        number = tokens // self._width
        if number >= BINS:
            return float(self.limit)
        part = tokens / self._width - number
        to_go = self._to_go[number] * (1 - part) + self._to_go[number + 1] * part
        return min(tokens + max(to_go, 1.0), float(self.limit))

    def alive(self, tokens: int, stretch: float) -> NDArray[np.float64]:
        """Of one that has so many tokens, and whose rest is `stretch` times as long as others': the probability that it goes
        on behind each multiple of the intervals' width from here, 0 first, [BINS]. Not to be written to."""
        key = min(tokens // self._width, BINS - 1), round(_STRETCHES * log2(stretch))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._row(*key)
        return row

    def _row(self, number: int, stretch: int) -> NDArray[np.float64]:
        ages = number + self._since / (self._width * 2 ** (stretch / _STRETCHES))
        row = np.interp(ages, np.arange(BINS + 1), self._curve) / self._curve[number]
        row[self._since >= self.limit - number * self._width] = 0.0
        return row

    def _tell(self) -> None:
        self._num_told += 1
        if self._num_told % _SUM_AFTER == 0:
            self._sum()

    def _sum(self) -> None:
        exposed = self._exposed + self._living * self._unit
        hazards = np.minimum(np.array(self._ended) / exposed, _MOST_HAZARD)
        self._curve = np.concatenate(([1.0], np.cumprod(1 - hazards)))
        areas = (self._curve[:-1] + self._curve[1:]) / 2
        to_go = np.cumsum(areas[::-1])[::-1] / self._curve[:-1] * self._width
        self._to_go: list[float] = [*to_go.tolist(), 0.0]
        self._rows.clear()

    def _rescale(self) -> None:
        least = _LEAST_WEIGHT / _PRIOR
        self._exposed = np.maximum(self._exposed / self._unit, least * self._prior_exposed)
        self._ended = [max(weight / self._unit, least * _PRIOR / BINS) for weight in self._ended]
        self._unit = 1.0
