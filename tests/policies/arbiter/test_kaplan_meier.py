"""The Kaplan-Meier estimator agrees with its definition."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.arbiter.kaplan_meier import NUM_BINS, KaplanMeierEstimator

LIMIT = 6400
WIDTH = LIMIT // NUM_BINS
TOLD = 32  # observations between two updates
PRIOR = 4.0

LENGTHS = st.lists(st.tuples(st.integers(0, LIMIT), st.booleans()), max_size=60)


def estimate_from(*observations: tuple[int, bool]) -> KaplanMeierEstimator:
    """Estimate from pairs of a length and a flag, which is False if the trajectory still runs."""
    survival = KaplanMeierEstimator(LIMIT)
    for tokens, ends in observations:
        if ends:
            survival.add_ended(0, tokens)
        else:
            survival.assume_alive(0, tokens)
    settle(survival)
    return survival


def settle(survival: KaplanMeierEstimator) -> None:
    """Add observations until the estimate is updated."""
    for _ in range(TOLD):
        survival.assume_alive(0, 0)


def compute_curve(survival: KaplanMeierEstimator) -> list[float]:
    """Return the probability that a trajectory reaches each interval."""
    return survival.survival_curve(0, 1.0).tolist()


@given(LENGTHS)
def test_the_estimate_is_the_product_of_survival_rates_by_age(observations: Sequence[tuple[int, bool]]) -> None:
    expected, at = [1.0], 1.0
    for number in range(NUM_BINS - 1):
        began = sum(tokens // WIDTH >= number + (not ends) for tokens, ends in observations) + PRIOR * (
            1 - number / NUM_BINS
        )
        ended = sum(tokens // WIDTH == number for tokens, ends in observations if ends) + PRIOR / NUM_BINS
        at *= 1 - ended / began
        expected.append(at)
    assert compute_curve(estimate_from(*observations)) == pytest.approx(
        expected, rel=0.05
    )  # the last of sixty observations weighs 1% more than the first


def test_without_observations_all_lengths_are_equally_likely() -> None:
    survival = KaplanMeierEstimator(LIMIT)
    assert compute_curve(survival) == pytest.approx(1 - np.arange(NUM_BINS) / NUM_BINS)
    assert survival.mean == pytest.approx(LIMIT / 2)
    assert survival.compute_mean_beyond(LIMIT // 2) == pytest.approx(LIMIT * 3 / 4)


def test_assumed_survival_is_removed_if_the_trajectory_ends_earlier() -> None:
    ahead, plain = KaplanMeierEstimator(LIMIT), KaplanMeierEstimator(LIMIT)
    for tokens in (350, 1250, 2999, 20) * 20:
        ahead.assume_alive(0, 1000)
        ahead.assume_alive(1000, 3000)
        ahead.add_ended(3000, tokens)
        plain.add_ended(0, tokens)
    settle(ahead)
    settle(plain)
    assert compute_curve(ahead) == pytest.approx(compute_curve(plain))


def test_assumed_survival_is_removed_even_after_many_other_ends() -> None:
    survival = KaplanMeierEstimator(LIMIT)
    for _ in range(4096):
        survival.assume_alive(0, 1000)
    for number in range(4096):  # the last observation weighs twice as much as the first
        survival.add_ended(1000, 350 if number % 8 else 650)
    settle(survival)
    assert compute_curve(survival)[5] == pytest.approx(1 / 8, abs=0.01)
    assert survival.compute_mean_beyond(3200) == pytest.approx(4800, rel=0.01)


def test_assumed_survival_counts_until_the_assumed_length() -> None:
    survival = estimate_from(*[(450, True)] * 50)
    before = compute_curve(survival)[5]
    for _ in range(50):
        survival.assume_alive(0, 1000)
    settle(survival)
    assert compute_curve(survival)[5] == pytest.approx((before + 1) / 2, abs=0.02)


def test_rescaling_of_large_weights_keeps_the_estimates() -> None:
    survival = estimate_from(*[(950, True), (3050, True)] * 100)
    before = compute_curve(survival), survival.mean
    scaled = estimate_from(*[(950, True), (3050, True)] * 100)
    scaled._at_risk *= 1e12  # pyright: ignore[reportPrivateUsage] - as after 40 half-observations
    scaled._ended = [weight * 1e12 for weight in scaled._ended]  # pyright: ignore[reportPrivateUsage]
    scaled._unit_weight = 1.1e12  # pyright: ignore[reportPrivateUsage]
    scaled.add_ended(0, 950)
    settle(scaled)
    assert scaled._unit_weight == 1.0  # pyright: ignore[reportPrivateUsage]
    assert (compute_curve(scaled), scaled.mean) == (
        pytest.approx(before[0], rel=0.02),
        pytest.approx(before[1], rel=0.02),
    )


def test_lengths_without_recent_observations_stay_possible() -> None:
    survival = KaplanMeierEstimator(LIMIT)
    survival._unit_weight = 1e12  # pyright: ignore[reportPrivateUsage] - the prior is negligible
    for _ in range(200):
        survival.add_ended(0, 50)
    settle(survival)
    assert survival.mean == pytest.approx(50, abs=1)
    assert survival.compute_mean_beyond(3200) == pytest.approx(4800, rel=0.01)


@given(LENGTHS, st.integers(0, LIMIT))
def test_the_expected_length_is_between_the_current_length_and_the_limit(
    observations: Sequence[tuple[int, bool]], tokens: int
) -> None:
    assert min(tokens + 1, LIMIT) <= estimate_from(*observations).compute_mean_beyond(tokens) <= LIMIT


@given(LENGTHS, st.integers(0, LIMIT), st.floats(0.1, 8))
def test_the_survival_curve_starts_at_1_never_rises_and_is_0_at_the_limit(
    observations: Sequence[tuple[int, bool]], tokens: int, stretch: float
) -> None:
    row = estimate_from(*observations).survival_curve(tokens, stretch)
    assert row.shape == (NUM_BINS,)
    assert row[0] == 1.0
    assert (np.diff(row) <= 0).all()
    assert (row >= 0).all()
    first = min(tokens // WIDTH, NUM_BINS - 1)
    assert (row[NUM_BINS - first :] == 0.0).all()


def test_a_group_factor_of_2_stretches_the_survival_curve_by_2() -> None:
    survival = estimate_from(*[(tokens, True) for tokens in range(0, LIMIT // 2, 25)])
    plain, stretched, halved = (survival.survival_curve(500, stretch) for stretch in (1.0, 2.0, 0.5))
    assert stretched[:50:2] == pytest.approx(plain[:25])
    assert halved[:25] == pytest.approx(plain[:50:2])


@pytest.mark.parametrize("limit", [1, 63, 65, 100, 1200])
def test_the_limit_need_not_be_a_multiple_of_the_interval_width(limit: int) -> None:
    survival = KaplanMeierEstimator(limit)
    for tokens in range(TOLD):
        survival.add_ended(0, min(tokens, limit))
    for tokens in range(limit + 1):
        assert min(tokens + 1, limit) <= survival.compute_mean_beyond(tokens) <= limit
        if tokens < limit:
            assert survival.survival_curve(tokens, 1.0)[0] == 1.0
