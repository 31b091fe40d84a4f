"""Advantages of shuffled rewards, for a run that must not learn: a control of the word problems' experiment.

    asterism run examples/word_problems/word_problems.toml --set model.checkpoint=FOLDER --set roc.enabled=false \
        --set rl.advantage_estimator=examples/word_problems/shuffled_rewards.py:compute_advantages
"""

from collections.abc import Sequence
from random import Random

from asterism.policies.groups.advantages import compute_advantages as compute_grpo_advantages


def compute_advantages(rewards: Sequence[float]) -> list[float]:
    """Compute GRPO's advantages of a permutation of the rewards. Equal rewards have equal permutations, for replays."""
    shuffled = list(rewards)
    Random(repr(shuffled)).shuffle(shuffled)
    return compute_grpo_advantages(shuffled)
