"""Statistics of several answers per question, compared with enumerations and known values."""

from itertools import combinations
from math import isclose, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.analysis.evaluation.answer_statistics import (
    Vote,
    compute_bootstrap_interval,
    compute_lengths,
    compute_majority,
    compute_pass_at_k,
    compute_standard_error,
    list_powers,
    normalize_answer,
)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer(answers: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    choices = list(combinations(answers, k))
    expected = sum(map(any, choices)) / len(choices)
    assert isclose(compute_pass_at_k(len(answers), sum(answers), k), expected)


def test_pass_at_k_of_many_answers_is_exact() -> None:
    product = 1.0
    for factor in range(1024 - 3 + 1, 1024 + 1):  # 1 - prod(1 - k / i), with n = 1024, c = 3, k = 256
        product *= 1 - 256 / factor
    assert isclose(compute_pass_at_k(1024, 3, 256), 1 - product)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_answers(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs at least {k} answers, not 4"):
        compute_pass_at_k(4, 1, k)


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ([("42", True), ("42", True), ("41", False)], 1.0),
        ([("42", True), ("41", False), (" 41.", False)], 0.0),
        ([("42", True), ("41", False)], 0.5),  # a tie
        ([("42", True), ("40", False), ("41", False)], 1 / 3),
        ([("", False), ("", False), ("42", True)], 1.0),  # an empty answer has no vote
        ([("", False), ("", False)], 0.0),
        ([(r"\frac12", True), ("0.5", True), ("1", False)], 1.0),  # correct answers are equal, whatever their form
        ([], 0.0),
    ],
)
def test_the_majority_is_the_most_frequent_extracted_answer(votes: list[tuple[str, bool]], expected: float) -> None:
    assert compute_majority([Vote(*vote) for vote in votes]) == expected


@pytest.mark.parametrize(
    ("text", "normal"),
    [(r"$\left( 1,2 \right)$", "(1,2)"), ("1,234", "1234"), (r"\dfrac{1}{2} .", r"\frac{1}{2}"), ("x = 3", "x=3")],
)
def test_answers_are_compared_without_their_layout(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_powers_of_two_end_with_the_number_of_samples() -> None:
    assert [list_powers(samples) for samples in (1, 2, 6, 32)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32]]


def test_the_standard_error_of_a_mean_assumes_independent_values() -> None:
    assert compute_standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx(sqrt(1 / 3) / 2)
    assert compute_standard_error([0.5]) is None


def test_the_bootstrap_interval_contains_the_mean_and_depends_only_on_its_seed() -> None:
    values = [0.0, 0.25, 0.5, 1.0] * 8
    interval = compute_bootstrap_interval(values, seed=3)
    assert interval is not None
    low, high = interval
    error = compute_standard_error(values)
    assert error is not None
    assert low == pytest.approx(0.4375 - 1.96 * error, abs=0.02)
    assert high == pytest.approx(0.4375 + 1.96 * error, abs=0.02)
    assert compute_bootstrap_interval(values, seed=3) == interval != compute_bootstrap_interval(values, seed=4)
    assert compute_bootstrap_interval([], seed=0) is None


def test_lengths_have_mean_median_and_tail() -> None:
    lengths = compute_lengths(range(1, 12))
    assert lengths is not None
    assert (lengths.mean, lengths.median, lengths.p90, lengths.max) == (6.0, 6.0, 10.0, 11.0)
    assert compute_lengths([]) is None
