"""The forecast peak demand equals the peak of a simulation, which adds tokens to all trajectories one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from asterism.policies.arbiter.kv_demand import KvDemandForecast, compute_interval_starts

LIMIT = 64  # at this limit, intervals are one token wide and the forecast is exact


def make_curve(remaining: int, limit: int = LIMIT) -> NDArray[np.float64]:
    """Make the survival curve of a trajectory with a fixed number of remaining tokens."""
    return (compute_interval_starts(limit) < remaining).astype(np.float64)


def add(forecast: KvDemandForecast, tid: int, tokens: int, remaining: int, limit: int = LIMIT) -> None:
    forecast.update(tid, tokens, tokens, tokens + remaining, lambda: make_curve(remaining, limit))


def simulate_peak(sizes: list[tuple[int, int]]) -> int:
    """Return the peak demand of trajectories that grow in parallel. `sizes`: tokens and remaining tokens of each."""
    return max(
        sum(tokens + moment for tokens, remaining in sizes if remaining >= moment)
        for moment in range(max(remaining for _, remaining in sizes) + 1)
    )


SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=80)


@given(SIZES, st.tuples(st.integers(1, 40), st.integers(0, 40)))
def test_a_trajectory_fits_if_the_peak_demand_fits(sizes: list[tuple[int, int]], one: tuple[int, int]) -> None:
    forecast = KvDemandForecast(LIMIT)
    for tid, (tokens, remaining) in enumerate(sizes):
        add(forecast, tid, tokens, remaining)
    need = simulate_peak([*sizes, one])
    assert forecast.can_fit(one[0], make_curve(one[1]), need)
    assert not forecast.can_fit(one[0], make_curve(one[1]), need - 1)


@given(SIZES, st.data())
def test_the_forecast_follows_removals_and_updates_of_trajectories(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    forecast, left = KvDemandForecast(LIMIT), dict[int, tuple[int, int]]()
    for tid, (tokens, remaining) in enumerate(sizes):
        add(forecast, tid, tokens, remaining)
        left[tid] = (tokens, remaining)
    for tid in data.draw(st.lists(st.sampled_from(range(len(sizes))))):
        forecast.remove(tid)
        left.pop(tid, None)
    for tid in data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)):
        left[tid] = (7, 9)
        add(forecast, tid, 7, 9)
    assert forecast.committed_tokens == sum(map(sum, left.values()))
    assert forecast.reads == sum(tokens * steps + steps * steps / 2 for tokens, steps in left.values())
    assert forecast.get_longest_remaining() == max((steps for _, steps in left.values()), default=0)
    need = simulate_peak([*left.values(), (3, 5)])
    assert forecast.can_fit(3, make_curve(5), need)
    assert not forecast.can_fit(3, make_curve(5), need - 1)


def test_a_trajectory_longer_than_expected_demands_its_current_tokens() -> None:
    forecast = KvDemandForecast(LIMIT)
    forecast.update(1, 50, 50, 20.0, lambda: make_curve(0))
    assert forecast.committed_tokens == 50
    assert forecast.can_fit(10, make_curve(0), 60)
    assert not forecast.can_fit(11, make_curve(0), 60)


def test_leased_tokens_are_not_counted_as_free() -> None:
    forecast = KvDemandForecast(LIMIT)
    forecast.update(1, 10, 40, 15.0, lambda: make_curve(5))
    assert forecast.can_fit(20, make_curve(5), 40 + 25)
    assert not forecast.can_fit(20, make_curve(5), 40 + 24)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 0.99)), min_size=1, max_size=20))
def test_the_demand_of_an_interval_is_weighted_by_survival(sizes: list[tuple[int, float]]) -> None:
    """Each trajectory continues with the same probability at every token."""
    forecast = KvDemandForecast(LIMIT)
    for tid, (tokens, survives) in enumerate(sizes):
        forecast.update(tid, tokens, tokens, tokens, lambda survives=survives: survives ** np.arange(LIMIT))
    moments = range(1, LIMIT + 1)
    need = max(sum((tokens + r) * survives ** (r - 1) for tokens, survives in sizes) for r in moments)
    need = max(need, sum(tokens for tokens, _ in sizes))
    assert forecast.can_fit(0, make_curve(0), need + 1e-6)
    assert not forecast.can_fit(0, make_curve(0), need - 1e-6)


WIDE = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 640)), min_size=1, max_size=30)


@given(WIDE, st.tuples(st.integers(1, 400), st.integers(0, 640)))
def test_wider_intervals_never_underestimate_the_demand(sizes: list[tuple[int, int]], one: tuple[int, int]) -> None:
    forecast = KvDemandForecast(640)
    for tid, (tokens, remaining) in enumerate(sizes):
        add(forecast, tid, tokens, remaining, 640)
    need = simulate_peak([*sizes, one])
    assert not forecast.can_fit(one[0], make_curve(one[1], 640), need - 1)
    assert forecast.can_fit(one[0], make_curve(one[1], 640), need + 10 * (len(sizes) + 1))  # 10: interval width
