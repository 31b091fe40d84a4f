"""Group-relative advantages (GRPO)."""

import math
from collections.abc import Sequence

EPSILON = 1e-6  # keeps the advantages finite for almost equal rewards


def compute_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward minus the group's mean, over the group's sample standard deviation (divisor G -
    1) plus 1e-6.

    Zeros for equal rewards and for a group of one.
    Source: GRPO, arXiv 2402.03300, section 4.1.2; divisor and epsilon as in verl and TRL.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]
