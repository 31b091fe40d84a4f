"""Computes advantages within a group."""

import math
from collections.abc import Callable, Sequence
from typing import cast

from asterism.configs.errors import UnusableInput
from asterism.configs.import_path import load_object
from asterism.configs.schema.algorithm import RlConfig

EPSILON = 1e-6  # keeps the advantages finite for almost equal rewards

# A deterministic function of a group's rewards, because it runs in a decider and replays repeat its decisions.
AdvantageEstimator = Callable[[Sequence[float]], Sequence[float]]


def compute_advantages(rewards: Sequence[float]) -> list[float]:
    """Return (reward - group's mean) / (sample standard deviation + 1e-6), with the divisor G - 1, for each reward.

    Equal rewards, and a group of one, have advantages of 0.
    Source: GRPO, arXiv 2402.03300, section 4.1.2; divisor and epsilon as in verl and TRL.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    centered = center_rewards(rewards)
    deviation = math.sqrt(math.fsum(each**2 for each in centered) / (len(rewards) - 1))
    return [each / (deviation + EPSILON) for each in centered]


def center_rewards(rewards: Sequence[float]) -> list[float]:
    """Return each reward minus the group's mean. Source: Dr. GRPO, arXiv 2503.20783, section 3.2."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


ESTIMATORS: dict[str, AdvantageEstimator] = {"grpo": compute_advantages, "dr_grpo": center_rewards}


def load_advantage_estimator(rl: RlConfig) -> AdvantageEstimator:
    """Load the estimator. Raises UnusableInput; so does the estimator for advantages that do not fit the rewards."""
    if rl.advantage_estimator in ESTIMATORS:
        return ESTIMATORS[rl.advantage_estimator]
    key = "rl.advantage_estimator"
    estimate = cast(AdvantageEstimator, load_object(rl.advantage_estimator, key))

    def estimate_checked(rewards: Sequence[float]) -> list[float]:
        advantages = [float(each) for each in estimate(rewards)]
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            raise UnusableInput(f"{key}: {advantages} do not fit the rewards {list(rewards)}")
        return advantages

    return estimate_checked
