import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.groups.advantages import compute_advantages

REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=32)


def test_an_advantage_is_the_distance_from_the_mean_in_sample_standard_deviations() -> None:
    assert compute_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_equal_rewards_give_zero_advantages() -> None:
    assert compute_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_groups_of_one_or_none_give_zero_advantages() -> None:
    assert compute_advantages([1.0]) == [0.0]
    assert compute_advantages([]) == []


@given(REWARDS)
def test_advantages_sum_to_0_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    advantages = compute_advantages(rewards)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    by_reward = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert by_reward == sorted(advantages)


@given(REWARDS.filter(lambda rewards: statistics.stdev(rewards) > 0.1))
def test_advantages_of_a_group_have_unit_sample_deviation(rewards: list[float]) -> None:
    assert statistics.stdev(compute_advantages(rewards)) == pytest.approx(1.0, abs=1e-4)
