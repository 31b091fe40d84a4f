"""How much better than its siblings a rollout was."""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6  # keeps a group with almost equal rewards finite


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the group's mean, over the group's sample standard deviation (divisor G - 1) plus 1e-6.

    Equal rewards, and a group of one, teach nothing: all zeros.
    Source: GRPO, arXiv 2402.03300, section 4.1.2; divisor and epsilon as in verl and TRL.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]
