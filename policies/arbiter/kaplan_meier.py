"""The Kaplan-Meier estimate of trajectory lengths, with running trajectories as censored observations.

Source: Nonparametric Estimation from Incomplete Observations, JASA 1958. The hazard of an age is the
share of the trajectories that end at the age, among all that reach the age. An estimate from finished
trajectories alone would be biased towards short lengths. Weights halve every `_HALF_LIFE`
trajectories, because response lengths change as the policy learns. A running trajectory weighs as
much as a trajectory that ends now.
"""

from math import log2

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 64
_HALF_LIFE = 4096.0  # trajectories
_PRIOR_TRAJECTORIES = 4.0  # weight of the prior in trajectories, with lengths uniform up to the limit
_UPDATE_EVERY = 32  # observations between two updates of the curve
_MIN_PRIOR_WEIGHT = 1e-12  # least weight of the prior, relative to the weight 1 of a new trajectory
_MAX_HAZARD = 1 - 1e-4  # below 1, so that the survival beyond any age stays defined
_FACTORS_PER_DOUBLING = 8  # resolution of `group_factor` in the cache of curves


class KaplanMeierEstimator:
    """An estimator of lengths in [0, limit] tokens, in `NUM_BINS` equal intervals."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._width = -(-limit // NUM_BINS)
        self._prior_at_risk = _PRIOR_TRAJECTORIES * (1 - np.arange(NUM_BINS) / NUM_BINS)
        # Weight of the ended trajectories by interval: `_at_risk` reached the interval, `_ended` ended in it.
        self._at_risk = self._prior_at_risk.copy()
        self._ended = [_PRIOR_TRAJECTORIES / NUM_BINS] * NUM_BINS
        # Number of running trajectories that are assumed to survive each interval.
        self._assumed_alive = np.zeros(NUM_BINS, np.int64)
        self._unit_weight = 1.0  # weight of the next trajectory; it grows, so that older weights need no update
        self._num_updates = 0
        self._interval_starts = np.arange(NUM_BINS) * float(self._width)
        self._cached_curves: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._update_curve()

    def assume_alive(self, before: int, until: int) -> None:
        """Move the assumed survival of a running trajectory from `before` to `until` tokens.

        Called when a lease is granted: ends are reported immediately, so running trajectories
        would otherwise be underrepresented.
        """
        self._assumed_alive[before // self._width : until // self._width] += 1
        self._count_update()

    def add_ended(self, assumed_until: int, final_tokens: int) -> None:
        """Replace the assumed survival of a trajectory by its end with `final_tokens`."""
        last = min(final_tokens // self._width, NUM_BINS - 1)
        self._assumed_alive[: assumed_until // self._width] -= 1
        self._at_risk[: last + 1] += self._unit_weight
        self._ended[last] += self._unit_weight
        self._unit_weight *= 2 ** (1 / _HALF_LIFE)
        if self._unit_weight > 1e12:
            self._rescale()
        self._count_update()

    @property
    def mean(self) -> float:
        return self._mean_remaining[0]

    def compute_mean_beyond(self, tokens: int) -> float:
        """Return the expected length of a running trajectory with `tokens` tokens, at most the limit."""
        number = tokens // self._width
        if number >= NUM_BINS:
            return float(self.limit)
        part = tokens / self._width - number
        remaining_tokens = self._mean_remaining[number] * (1 - part) + self._mean_remaining[number + 1] * part
        return min(tokens + max(remaining_tokens, 1.0), float(self.limit))

    def survival_curve(self, tokens: int, group_factor: float) -> NDArray[np.float64]:
        """Return the probability that a trajectory of `tokens` tokens gains more than i interval widths.

        Read-only float64 [NUM_BINS], i = 0 first. The trajectory's remaining length is
        `group_factor` times the typical remaining length.
        """
        key = min(tokens // self._width, NUM_BINS - 1), round(_FACTORS_PER_DOUBLING * log2(group_factor))
        curve = self._cached_curves.get(key)
        if curve is None:
            curve = self._cached_curves[key] = self._compute_curve(*key)
        return curve

    def _compute_curve(self, number: int, factor_step: int) -> NDArray[np.float64]:
        ages = number + self._interval_starts / (self._width * 2 ** (factor_step / _FACTORS_PER_DOUBLING))
        curve = np.interp(ages, np.arange(NUM_BINS + 1), self._curve) / self._curve[number]
        curve[self._interval_starts >= self.limit - number * self._width] = 0.0
        return curve

    def _count_update(self) -> None:
        self._num_updates += 1
        if self._num_updates % _UPDATE_EVERY == 0:
            self._update_curve()

    def _update_curve(self) -> None:
        at_risk = self._at_risk + self._assumed_alive * self._unit_weight
        hazards = np.minimum(np.array(self._ended) / at_risk, _MAX_HAZARD)
        self._curve = np.concatenate(([1.0], np.cumprod(1 - hazards)))
        areas = (self._curve[:-1] + self._curve[1:]) / 2
        to_go = np.cumsum(areas[::-1])[::-1] / self._curve[:-1] * self._width
        self._mean_remaining: list[float] = [*to_go.tolist(), 0.0]
        self._cached_curves.clear()

    def _rescale(self) -> None:
        least = _MIN_PRIOR_WEIGHT / _PRIOR_TRAJECTORIES
        self._at_risk = np.maximum(self._at_risk / self._unit_weight, least * self._prior_at_risk)
        self._ended = [
            max(weight / self._unit_weight, least * _PRIOR_TRAJECTORIES / NUM_BINS) for weight in self._ended
        ]
        self._unit_weight = 1.0
