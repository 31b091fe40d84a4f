"""The expected KV demand of an engine's trajectories over their remaining lengths, and its peak.

The model: all trajectories grow together, one token at a time, and free their pages at their ends.
After a growth of r tokens, they hold

    demand(r) = sum over i of (tokens_i + r) * P(remaining_i >= r)

The forecast stores the sum for r = 0 and an upper bound for each of `NUM_BINS` intervals of r up to
the response limit. Adding, removing or updating a trajectory takes one pass over the intervals,
independent of the number of trajectories.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from asterism.policies.arbiter.kaplan_meier import NUM_BINS

SurvivalCurveGetter = Callable[[], NDArray[np.float64]]


def compute_interval_starts(limit: int) -> NDArray[np.float64]:
    """Return the start of each interval of r in tokens, [NUM_BINS]."""
    return np.arange(NUM_BINS, dtype=np.float64) * -(-limit // NUM_BINS)


class KvDemandForecast:
    """The forecast of one engine, in tokens; each trajectory counts the whole shared prompt."""

    def __init__(self, limit: int) -> None:
        """`limit`: the maximum number of new tokens of a trajectory."""
        self.committed_tokens = 0.0  # demand if all trajectories had their expected final lengths
        self.reads = 0.0  # cached tokens that all remaining decode steps read
        # Growth r: 0 for the present, then the end of each interval.
        self._interval_ends = np.append(0.0, compute_interval_starts(limit) + -(-limit // NUM_BINS))
        self._demand = np.zeros(NUM_BINS + 1)
        # The next five tables are by trajectory.
        self._tokens: dict[int, float] = {}
        self._remaining: dict[int, float] = {}
        self._leased: dict[int, float] = {}
        self._survival_curves: dict[int, SurvivalCurveGetter] = {}
        self._contributions: dict[int, NDArray[np.float64]] = {}  # parts of `_demand`
        self._dirty: set[int] = set()  # trajectories with an outdated contribution

    def update(
        self,
        trajectory_id: int,
        tokens: float,
        leased_tokens: float,
        final_tokens: float,
        survival_curve: SurvivalCurveGetter,
    ) -> None:
        """Set a trajectory's present, leased and expected final tokens.

        The next computation of the demand calls `survival_curve`, which returns the probability that
        the trajectory continues beyond each interval start, [NUM_BINS].
        """
        self.remove(trajectory_id)
        remaining_tokens = final_tokens - tokens if final_tokens > tokens else 0.0
        self._tokens[trajectory_id], self._remaining[trajectory_id] = tokens, remaining_tokens
        self._leased[trajectory_id], self._survival_curves[trajectory_id] = leased_tokens, survival_curve
        self.committed_tokens += tokens + remaining_tokens
        self.reads += count_kv_reads(tokens, remaining_tokens)
        self._dirty.add(trajectory_id)

    def remove(self, trajectory_id: int) -> None:
        tokens = self._tokens.pop(trajectory_id, None)
        if tokens is not None:
            remaining_tokens = self._remaining.pop(trajectory_id)
            self.committed_tokens -= tokens + remaining_tokens
            self.reads -= count_kv_reads(tokens, remaining_tokens)
            del self._leased[trajectory_id], self._survival_curves[trajectory_id]
        if trajectory_id in self._contributions:
            self._dirty.add(trajectory_id)
        else:
            self._dirty.discard(trajectory_id)

    def get_longest_remaining(self) -> float:
        """Return the largest expected number of new tokens of a trajectory."""
        return max(self._remaining.values(), default=0.0)

    def can_fit(self, tokens: float, survival_curve: NDArray[np.float64], capacity: float) -> bool:
        """Return whether the peak demand with one further trajectory is at most `capacity`."""
        self._refresh_demand()
        need = self._demand + _compute_demand(self._interval_ends + tokens, survival_curve)
        return bool(need.max() <= capacity)

    def _refresh_demand(self) -> None:
        for trajectory_id in self._dirty:
            before = self._contributions.pop(trajectory_id, None)
            if before is not None:
                self._demand -= before
        new = [trajectory_id for trajectory_id in self._dirty if trajectory_id in self._tokens]
        self._dirty.clear()
        if not new:
            return
        tokens_N1 = np.array([[self._tokens[trajectory_id]] for trajectory_id in new])
        leased_N1 = np.array([[self._leased[trajectory_id]] for trajectory_id in new])
        alive = np.array([self._survival_curves[trajectory_id]() for trajectory_id in new])
        parts = _compute_demand(np.maximum(self._interval_ends + tokens_N1, leased_N1), alive)
        self._demand += parts.sum(0)
        self._contributions.update(zip(new, parts, strict=True))


def _compute_demand(tokens: NDArray[np.float64], survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the demand of trajectories now and within each interval, [..., 1 + NUM_BINS]."""
    part = tokens.copy()
    part[..., 1:] *= survival
    return part


def count_kv_reads(tokens: float, remaining_tokens: float) -> float:
    """Return the number of cached tokens that the `remaining_tokens` decode steps after `tokens` read."""
    return (tokens + remaining_tokens / 2) * remaining_tokens
