"""Chooses the groups to train on."""

from collections.abc import Callable, Sequence
from typing import cast

from asterism.configs.import_path import load_object
from asterism.configs.schema.algorithm import RlConfig

# A deterministic function of a group's rewards, because it runs in a decider and replays repeat its decisions.
GroupFilter = Callable[[Sequence[float]], bool]  # returns whether to train on the group


def has_unequal_rewards(rewards: Sequence[float]) -> bool:
    """Keep groups with unequal rewards: equal ones have no gradient. Source: DAPO, arXiv 2503.14476, section 3.2."""
    return len(set(rewards)) > 1


def keep_all(_rewards: Sequence[float]) -> bool:
    """Keep all groups. A group with equal rewards has no gradient, but a mean over the batch counts its tokens."""
    return True


FILTERS: dict[str, GroupFilter] = {"unequal_rewards": has_unequal_rewards, "all": keep_all}


def load_group_filter(rl: RlConfig) -> GroupFilter:
    """Load the filter. Raises UnusableInput."""
    if rl.group_filter in FILTERS:
        return FILTERS[rl.group_filter]
    return cast(GroupFilter, load_object(rl.group_filter, "rl.group_filter"))
