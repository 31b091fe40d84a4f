"""The worst moment to come, held against a simulation that grows every trajectory token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.forecast import Forecast

LIMIT = 64  # as many intervals: the forecast is exact


def peak(sizes: list[tuple[int, int]]) -> int:
    """`sizes`: tokens and remaining of each. All grow in step; each frees its pages at its end."""
    return max(
        sum(tokens + moment for tokens, remaining in sizes if remaining >= moment)
        for moment in range(max(remaining for _, remaining in sizes) + 1)
    )


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=80)


@given(SIZES, st.tuples(st.integers(1, 40), st.integers(0, 40)))
def test_one_more_fits_if_the_worst_moment_of_all_does(sizes: list[tuple[int, int]], one: tuple[int, int]) -> None:
    forecast = Forecast(LIMIT)
    for tid, (tokens, remaining) in enumerate(sizes):
        forecast.put(tid, tokens, tokens + remaining)
    need = peak([*sizes, one])
    assert forecast.fits(one[0], sum(one), need)
    assert not forecast.fits(one[0], sum(one), need - 1)


@given(SIZES, st.data())
def test_what_is_removed_or_put_anew_counts_as_it_is_now(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    forecast, left = Forecast(LIMIT), dict[int, tuple[int, int]]()
    for tid, (tokens, remaining) in enumerate(sizes):
        forecast.put(tid, tokens, tokens + remaining)
        left[tid] = (tokens, remaining)
    for tid in data.draw(st.lists(st.sampled_from(range(len(sizes))))):
        forecast.remove(tid)
        left.pop(tid, None)
    for tid in data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)):
        left[tid] = (7, 9)
        forecast.put(tid, 7, 16)
    assert forecast.committed == sum(map(sum, left.values()))
    need = peak([*left.values(), (3, 5)])
    assert forecast.fits(3, 8, need)
    assert not forecast.fits(3, 8, need - 1)


def test_a_trajectory_that_got_longer_than_expected_needs_what_it_has() -> None:
    forecast = Forecast(LIMIT)
    forecast.put(1, 50, 20.0)
    assert forecast.committed == 50
    assert forecast.fits(10, 10, 60)
    assert not forecast.fits(11, 11, 60)


WIDE = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 640)), min_size=1, max_size=30)


@given(WIDE, st.tuples(st.integers(1, 400), st.integers(0, 640)))
def test_with_wider_intervals_nothing_fits_that_would_not(sizes: list[tuple[int, int]], one: tuple[int, int]) -> None:
    forecast = Forecast(640)
    for tid, (tokens, remaining) in enumerate(sizes):
        forecast.put(tid, tokens, tokens + remaining)
    need = peak([*sizes, one])
    assert not forecast.fits(one[0], sum(one), need - 1)
    assert forecast.fits(one[0], sum(one), need + 10 * (len(sizes) + 1))  # an interval's width each
