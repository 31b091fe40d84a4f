from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.groups.problem_order import ProblemOrder
from asterism.policies.seeded_random import draw_uniform, mix, shuffle_range

keys = st.lists(st.integers(min_value=0, max_value=2**63), min_size=1, max_size=4)


@given(keys)
def test_a_draw_depends_only_on_its_keys(key: list[int]) -> None:
    assert draw_uniform(*key) == draw_uniform(*key)
    assert 0 <= draw_uniform(*key) < 1


def test_draws_are_uniform() -> None:
    draws = np.array([draw_uniform(7, number) for number in range(20_000)])
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 43.8  # limit for 19 degrees of freedom and p = 0.001


def test_the_order_of_keys_matters() -> None:
    assert mix(1, 2) != mix(2, 1)


@given(st.integers(min_value=0, max_value=200), st.integers(min_value=0, max_value=2**32))
def test_a_shuffle_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(shuffle_range(count, seed)) == list(range(count))


@given(st.integers(min_value=1, max_value=50), st.integers(min_value=0, max_value=5))
def test_each_epoch_contains_each_problem_once(num_problems: int, epoch: int) -> None:
    order = ProblemOrder([num_problems], [1.0], 3)
    positions = range(epoch * num_problems, (epoch + 1) * num_problems)
    assert sorted(order.select(position) for position in positions) == list(range(num_problems))


def test_epochs_differ_in_their_order() -> None:
    order = ProblemOrder([50], [1.0], 3)
    first = [order.select(position) for position in range(50)]
    second = [order.select(position) for position in range(50, 100)]
    assert first != second


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), min_size=1, max_size=5),
    st.integers(1, 300),
    st.randoms(use_true_random=False),
)
def test_tasks_follow_their_weights_at_every_position_and_for_any_reading_order(
    tasks: list[tuple[int, float]], length: int, random: Random
) -> None:
    counts, weights = zip(*tasks, strict=True)
    positions = list(range(length))
    random.shuffle(positions)
    order = ProblemOrder(counts, weights, 3)
    chosen = {position: order.select(position) for position in positions}
    for task, weight in enumerate(weights):
        first = sum(counts[:task])
        problems = [chosen[position] for position in range(length) if first <= chosen[position] < first + counts[task]]
        assert abs(len(problems) - length * weight / sum(weights)) < len(tasks)
        assert sorted(problems[: counts[task]]) == sorted(set(problems[: counts[task]]))
