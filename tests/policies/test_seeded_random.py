import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.groups.group_starter import select_problem
from policies.seeded_random import draw_uniform, mix, shuffle_range

keys = st.lists(st.integers(min_value=0, max_value=2**63), min_size=1, max_size=4)


@given(keys)
def test_a_draw_depends_only_on_its_keys(key: list[int]) -> None:
    assert draw_uniform(*key) == draw_uniform(*key)
    assert 0 <= draw_uniform(*key) < 1


def test_draws_are_uniform() -> None:
    draws = np.array([draw_uniform(7, number) for number in range(20_000)])
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001


def test_the_order_of_keys_matters() -> None:
    assert mix(1, 2) != mix(2, 1)


@given(st.integers(min_value=0, max_value=200), st.integers(min_value=0, max_value=2**32))
def test_a_shuffle_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffle_range(count, seed)) == list(range(count))


@given(st.integers(min_value=1, max_value=50), st.integers(min_value=0, max_value=5))
def test_each_epoch_takes_each_problem_once(num_problems: int, epoch: int) -> None:
    positions = range(epoch * num_problems, (epoch + 1) * num_problems)
    assert sorted(select_problem(position, num_problems, 3) for position in positions) == list(range(num_problems))


def test_epochs_differ_in_their_order() -> None:
    first = [select_problem(position, 50, 3) for position in range(50)]
    second = [select_problem(position, 50, 3) for position in range(50, 100)]
    assert first != second
