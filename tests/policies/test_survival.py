"""Lengths by Kaplan and Meier's estimator, held against what it is defined to be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.survival import BINS, Survival

LIMIT = 6400
WIDTH = LIMIT // BINS
TOLD = 32  # sums are made anew after as many
PRIOR = 4.0

LENGTHS = st.lists(st.tuples(st.integers(0, LIMIT), st.booleans()), max_size=60)


def told(*lives: tuple[int, bool]) -> Survival:
    """Each has come so far, and has ended there or goes on."""
    survival = Survival(LIMIT)
    for tokens, ends in lives:
        if ends:
            survival.ended(0, tokens)
        else:
            survival.lives(0, tokens)
    settle(survival)
    return survival


def settle(survival: Survival) -> None:
    """What was told last counts, too."""
    for _ in range(TOLD):
        survival.lives(0, 0)


def curve(survival: Survival) -> list[float]:
    """The probability that a trajectory comes as far as each interval."""
    return survival.alive(0, 1.0).tolist()


@given(LENGTHS)
def test_at_each_age_the_share_of_those_that_came_so_far_and_went_on_is_what_counts(
    lives: Sequence[tuple[int, bool]],
) -> None:
    expected, at = [1.0], 1.0
    for number in range(BINS - 1):
        began = sum(tokens // WIDTH >= number + (not ends) for tokens, ends in lives) + PRIOR * (1 - number / BINS)
        ended = sum(tokens // WIDTH == number for tokens, ends in lives if ends) + PRIOR / BINS
        at *= 1 - ended / began
        expected.append(at)
    assert curve(told(*lives)) == pytest.approx(expected, rel=0.05)  # the newer of sixty weigh a hundredth more


def test_before_anything_is_known_all_lengths_are_as_likely() -> None:
    survival = Survival(LIMIT)
    assert curve(survival) == pytest.approx(1 - np.arange(BINS) / BINS)
    assert survival.mean == pytest.approx(LIMIT / 2)
    assert survival.mean_beyond(LIMIT // 2) == pytest.approx(LIMIT * 3 / 4)


def test_those_that_go_on_are_not_taken_for_short() -> None:
    """The ended alone have 450 tokens; as many have 3000 and run."""
    survival = told(*[(450, True), (3000, False)] * 100)
    assert curve(survival)[30] == pytest.approx(0.5, abs=0.03)
    assert survival.mean > (450 + 3000) / 2


def test_what_was_said_ahead_is_taken_back_when_the_end_comes_earlier() -> None:
    ahead, plain = Survival(LIMIT), Survival(LIMIT)
    for tokens in (350, 1250, 2999, 20) * 20:
        ahead.lives(0, 1000)
        ahead.lives(1000, 3000)
        ahead.ended(3000, tokens)
        plain.ended(0, tokens)
    settle(ahead)
    settle(plain)
    assert curve(ahead) == pytest.approx(curve(plain))


def test_however_many_end_between_what_was_said_of_one_and_its_end_all_of_it_is_taken_back() -> None:
    survival = Survival(LIMIT)
    for _ in range(4096):
        survival.lives(0, 1000)
    for number in range(4096):  # the last weighs twice what the first does
        survival.ended(1000, 350 if number % 8 else 650)
    settle(survival)
    assert curve(survival)[5] == pytest.approx(1 / 8, abs=0.01)
    assert survival.mean_beyond(3200) == pytest.approx(4800, rel=0.01)


def test_what_was_said_ahead_counts_until_then() -> None:
    survival = told(*[(450, True)] * 50)
    before = curve(survival)[5]
    for _ in range(50):
        survival.lives(0, 1000)
    settle(survival)
    assert curve(survival)[5] == pytest.approx((before + 1) / 2, abs=0.02)


def test_half_of_the_weight_is_forgotten_in_a_half_life() -> None:
    survival = told(*[(950, True)] * 4096, *[(5050, True)] * 4096)
    assert curve(survival)[20] == pytest.approx(1 / 1.5, rel=0.01)


def test_weights_are_made_small_again_before_they_are_too_large_and_estimates_stay() -> None:
    survival = told(*[(950, True), (3050, True)] * 100)
    before = curve(survival), survival.mean
    scaled = told(*[(950, True), (3050, True)] * 100)
    scaled._exposed *= 1e12  # pyright: ignore[reportPrivateUsage] - as after 40 half-lives
    scaled._ended = [weight * 1e12 for weight in scaled._ended]  # pyright: ignore[reportPrivateUsage]
    scaled._unit = 1.1e12  # pyright: ignore[reportPrivateUsage]
    scaled.ended(0, 950)
    settle(scaled)
    assert scaled._unit == 1.0  # pyright: ignore[reportPrivateUsage]
    assert (curve(scaled), scaled.mean) == (pytest.approx(before[0], rel=0.02), pytest.approx(before[1], rel=0.02))


def test_what_nobody_has_come_to_for_long_stays_possible() -> None:
    survival = Survival(LIMIT)
    survival._unit = 1e12  # pyright: ignore[reportPrivateUsage] - the prior counts nothing beside it
    for _ in range(200):
        survival.ended(0, 50)
    settle(survival)
    assert survival.mean == pytest.approx(50, abs=1)
    assert survival.mean_beyond(3200) == pytest.approx(4800, rel=0.01)


@given(LENGTHS, st.integers(0, LIMIT))
def test_one_that_goes_on_is_expected_to_end_behind_where_it_is_and_within_the_limit(
    lives: Sequence[tuple[int, bool]], tokens: int
) -> None:
    assert min(tokens + 1, LIMIT) <= told(*lives).mean_beyond(tokens) <= LIMIT


@given(LENGTHS, st.integers(0, LIMIT), st.floats(0.1, 8))
def test_the_probability_that_one_goes_on_begins_with_1_and_never_rises_and_is_0_at_the_limit(
    lives: Sequence[tuple[int, bool]], tokens: int, stretch: float
) -> None:
    row = told(*lives).alive(tokens, stretch)
    assert row.shape == (BINS,)
    assert row[0] == 1.0
    assert (np.diff(row) <= 0).all()
    assert (row >= 0).all()
    first = min(tokens // WIDTH, BINS - 1)
    assert (row[BINS - first :] == 0.0).all()


def test_whose_rest_is_twice_as_long_is_as_likely_alive_after_twice_the_tokens() -> None:
    survival = told(*[(tokens, True) for tokens in range(0, LIMIT // 2, 25)])
    plain, stretched, halved = (survival.alive(500, stretch) for stretch in (1.0, 2.0, 0.5))
    assert stretched[:50:2] == pytest.approx(plain[:25])
    assert halved[:25] == pytest.approx(plain[:50:2])


@pytest.mark.parametrize("limit", [1, 63, 65, 100, 1200])
def test_a_limit_need_not_be_a_multiple_of_the_intervals(limit: int) -> None:
    survival = Survival(limit)
    for tokens in range(TOLD):
        survival.ended(0, min(tokens, limit))
    for tokens in range(limit + 1):
        assert min(tokens + 1, limit) <= survival.mean_beyond(tokens) <= limit
        if tokens < limit:
            assert survival.alive(tokens, 1.0)[0] == 1.0
