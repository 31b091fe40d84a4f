"""The worst moment to come, held against a simulation that grows every trajectory token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies.forecast import Forecast, begins

LIMIT = 64  # as many intervals: the forecast is exact


def known(remaining: int, limit: int = LIMIT) -> NDArray[np.float64]:
    """Alive for so many tokens more, and no longer."""
    return (begins(limit) < remaining).astype(np.float64)


def put(forecast: Forecast, tid: int, tokens: int, remaining: int, limit: int = LIMIT) -> None:
    forecast.put(tid, tokens, tokens, tokens + remaining, lambda: known(remaining, limit))


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
        put(forecast, tid, tokens, remaining)
    need = peak([*sizes, one])
    assert forecast.fits(one[0], known(one[1]), need)
    assert not forecast.fits(one[0], known(one[1]), need - 1)


@given(SIZES, st.data())
def test_what_is_removed_or_put_anew_counts_as_it_is_now(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    forecast, left = Forecast(LIMIT), dict[int, tuple[int, int]]()
    for tid, (tokens, remaining) in enumerate(sizes):
        put(forecast, tid, tokens, remaining)
        left[tid] = (tokens, remaining)
    for tid in data.draw(st.lists(st.sampled_from(range(len(sizes))))):
        forecast.remove(tid)
        left.pop(tid, None)
    for tid in data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)):
        left[tid] = (7, 9)
        put(forecast, tid, 7, 9)
    assert forecast.committed == sum(map(sum, left.values()))
    assert forecast.reads == sum(tokens * steps + steps * steps / 2 for tokens, steps in left.values())
    assert forecast.longest() == max((steps for _, steps in left.values()), default=0)
    need = peak([*left.values(), (3, 5)])
    assert forecast.fits(3, known(5), need)
    assert not forecast.fits(3, known(5), need - 1)


def test_a_trajectory_that_got_longer_than_expected_needs_what_it_has() -> None:
    forecast = Forecast(LIMIT)
    forecast.put(1, 50, 50, 20.0, lambda: known(0))
    assert forecast.committed == 50
    assert forecast.fits(10, known(0), 60)
    assert not forecast.fits(11, known(0), 60)


def test_what_was_leased_ahead_is_not_given_twice() -> None:
    forecast = Forecast(LIMIT)
    forecast.put(1, 10, 40, 15.0, lambda: known(5))
    assert forecast.fits(20, known(5), 40 + 25)
    assert not forecast.fits(20, known(5), 40 + 24)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 0.99)), min_size=1, max_size=20))
def test_a_moment_needs_what_is_expected_of_those_that_may_have_ended_by_then(sizes: list[tuple[int, float]]) -> None:
    """Each goes on with the same probability at every token."""
    forecast = Forecast(LIMIT)
    for tid, (tokens, survives) in enumerate(sizes):
        forecast.put(tid, tokens, tokens, tokens, lambda survives=survives: survives ** np.arange(LIMIT))
    moments = range(1, LIMIT + 1)
    need = max(sum((tokens + r) * survives ** (r - 1) for tokens, survives in sizes) for r in moments)
    need = max(need, sum(tokens for tokens, _ in sizes))
    assert forecast.fits(0, known(0), need + 1e-6)
    assert not forecast.fits(0, known(0), need - 1e-6)


WIDE = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 640)), min_size=1, max_size=30)


@given(WIDE, st.tuples(st.integers(1, 400), st.integers(0, 640)))
def test_with_wider_intervals_nothing_fits_that_would_not(sizes: list[tuple[int, int]], one: tuple[int, int]) -> None:
    forecast = Forecast(640)
    for tid, (tokens, remaining) in enumerate(sizes):
        put(forecast, tid, tokens, remaining, 640)
    need = peak([*sizes, one])
    assert not forecast.fits(one[0], known(one[1], 640), need - 1)
    assert forecast.fits(one[0], known(one[1], 640), need + 10 * (len(sizes) + 1))  # an interval's width each
