"""Finds evaluations that fall while the training reward rises: the policy then learns the reward, not the task.

The questions of a set are the same in each evaluation. So the variance of the set's accuracy is at most the binomial
variance, and a fall of z standard errors is at least as rare as a fall of z standard deviations of a normal variable.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

MAX_POINTS = 200  # points to keep of each set and kind of sampling, the newest ones
_SET_PREFIX, _SET_SUFFIX = "set ", ": accuracy"
_REWARD_NOISE_FACTOR = 2.0  # least rise of the training reward, in standard errors of its change


class EvaluationPoint(msgspec.Struct, frozen=True):
    version: int
    accuracy: float
    answered: float
    reward: float | None  # mean training reward of the window before; None before the first window


class EvaluationDrop(NamedTuple):
    name: str  # the set and the kind of sampling
    before: EvaluationPoint
    newest: EvaluationPoint
    errors: float  # the fall in standard errors
    reward: float  # mean training reward of the window of `before`


def list_points(values: Mapping[str, float], version: int, reward: float | None) -> dict[str, EvaluationPoint]:
    """Return the points by set, or one point named "" without sets. Sets may be due at different steps, so that their
    sum is not comparable."""
    names = [name.removesuffix(_SET_SUFFIX) for name in values if name.startswith(_SET_PREFIX)]
    prefixes = {name: f"{name}: " for name in names if f"{name}{_SET_SUFFIX}" in values} or {"": ""}
    points: dict[str, EvaluationPoint] = {}
    for name, prefix in prefixes.items():
        accuracy = values.get(f"{prefix}accuracy")
        answered = values.get(f"{prefix}questions", 0.0) - values.get(f"{prefix}failed", 0.0)
        if accuracy is not None and answered > 0:
            points[name] = EvaluationPoint(version, accuracy, answered, reward)
    return points


def find_drop(
    name: str, points: Sequence[EvaluationPoint], first_reward: float, noise: float, window_steps: int
) -> EvaluationDrop | None:
    """Return the largest fall of the newest evaluation below an earlier one, if the training reward has risen since.

    `first_reward`: mean reward of the run's first window, for evaluations before that window. `noise`: the median
    change of the reward between two steps, about one standard deviation.
    """
    *earlier, newest = points
    if newest.reward is None:
        return None
    least_rise = _REWARD_NOISE_FACTOR * noise * math.sqrt(2 / window_steps)
    drops: list[EvaluationDrop] = []
    for point in earlier:
        reward = first_reward if point.reward is None else point.reward
        if newest.reward - reward > least_rise:
            drops.append(EvaluationDrop(name, point, newest, count_standard_errors(point, newest), reward))
    return max(drops, key=lambda drop: drop.errors, default=None)


def count_standard_errors(before: EvaluationPoint, after: EvaluationPoint) -> float:
    """Return the fall of the accuracy in standard errors, with the pooled accuracy (z test of two shares)."""
    total = before.answered + after.answered
    pooled = (before.accuracy * before.answered + after.accuracy * after.answered) / total
    error = math.sqrt(pooled * (1 - pooled) * (1 / before.answered + 1 / after.answered)) if 0 < pooled < 1 else 0.0
    return (before.accuracy - after.accuracy) / error if error else 0.0
