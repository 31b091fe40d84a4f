"""Estimates of lengths from the earlier lengths of the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.policies.arbiter import length_stats as lengths_module
from asterism.policies.arbiter.kv_ledger import KvAccount, Ledger
from asterism.policies.arbiter.length_estimates import LearnedLengthForecast
from asterism.policies.arbiter.length_stats import LengthHistogram, LengthStats
from tests.policies.arbiter.leases import PROMPT, joined, request

LIMIT = 6400


def learn(*tokens: int, times: int) -> LengthStats:
    """Learn from `times` ended trajectories of each of these lengths; every trajectory has one turn."""
    lengths = LengthStats(LIMIT)
    for each in tokens:
        for _ in range(times):
            lengths.add_turn(0, each)
            lengths.survival.add_ended(0, each)
    return lengths


def test_without_observations_all_lengths_are_equally_likely() -> None:
    assert LengthStats(LIMIT).survival.compute_mean_beyond(0) == pytest.approx(LIMIT / 2)
    assert LengthHistogram(LIMIT).estimate_quantile_beyond(0, 0.9) == pytest.approx(0.9 * LIMIT, abs=LIMIT / 64)


def test_observations_outweigh_the_prior() -> None:
    lengths = learn(950, times=1000)
    assert lengths.survival.compute_mean_beyond(0) == pytest.approx(950, abs=100)
    assert 950 <= lengths.estimate_turn_tokens(0, 0, 0.9) <= 1050


def test_a_trajectory_that_is_longer_than_all_others_is_expected_to_grow() -> None:
    lengths = learn(950, times=1000)
    assert lengths.survival.compute_mean_beyond(3000) > 3000
    assert lengths.estimate_turn_tokens(0, 3000, 0.5) > 3000


def test_weights_halve_after_a_half_life() -> None:
    lengths = learn(950, 5050, times=4096)
    old, new = 0.5, 1.0
    assert lengths.survival.compute_mean_beyond(0) == pytest.approx((950 * old + 5050 * new) / 1.5, rel=0.01)
    assert lengths.estimate_turn_tokens(0, 0, 0.3) < 1100
    assert lengths.estimate_turn_tokens(0, 0, 0.37) > 5000


def test_turn_lengths_without_recent_observations_stay_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths_module, "_HALF_LIFE", 8.0)
    histogram = LengthHistogram(LIMIT)
    for _ in range(10_000):
        histogram.add(50)
    assert histogram.estimate_quantile_beyond(0, 0.5) == 100
    assert 5000 < histogram.estimate_quantile_beyond(5000, 0.5) < LIMIT


@given(st.lists(st.integers(0, LIMIT + 10), max_size=50), st.integers(0, LIMIT), st.floats(0.01, 1))
def test_an_estimate_is_between_the_current_length_and_the_limit(learn: list[int], so_far: int, share: float) -> None:
    lengths = LengthStats(LIMIT)
    for number, tokens in enumerate(learn):
        lengths.add_turn(number % 12, tokens)
        lengths.survival.add_ended(0, tokens)
        lengths.update_expected_tokens(number % 3, None, tokens)
    assert min(so_far + 1, LIMIT) <= lengths.estimate_final_tokens(1, so_far) <= LIMIT
    assert min(so_far + 1, LIMIT) <= lengths.estimate_turn_tokens(2, so_far, share) <= LIMIT


def test_a_member_is_expected_to_become_as_long_as_its_siblings() -> None:
    lengths = LengthStats(LIMIT)
    for group in range(100):
        for _ in range(8):
            tokens = 500 if group else 4000
            lengths.survival.add_ended(0, tokens)
            lengths.update_expected_tokens(group, None, tokens)
    assert lengths.estimate_final_tokens(0, 0) > 4 * lengths.estimate_final_tokens(1, 0)
    assert lengths.estimate_final_tokens(1, 0) < lengths.estimate_final_tokens(777, 0) * 1.1


def test_the_expected_length_of_a_group_includes_its_running_members() -> None:
    lengths = LengthStats(LIMIT)
    for _ in range(500):
        lengths.survival.add_ended(0, 1000)
        lengths.survival.add_ended(0, 5000)
    for member in range(8):
        lengths.update_expected_tokens(0, None, lengths.survival.compute_mean_beyond(0))
        if member < 4:
            lengths.update_expected_tokens(0, lengths.survival.compute_mean_beyond(0), 1000.0)  # this member has ended
        else:
            lengths.update_expected_tokens(
                0, lengths.survival.compute_mean_beyond(0), lengths.survival.compute_mean_beyond(3000)
            )  # this member still runs
    assert lengths.survival.compute_mean_beyond(3000) == pytest.approx(5000, rel=0.05)
    assert lengths.estimate_final_tokens(0, 0) == pytest.approx(lengths.survival.compute_mean_beyond(0), rel=0.1)


def test_turn_lengths_are_estimated_by_turn_number() -> None:
    lengths = LengthStats(LIMIT)
    for _ in range(500):
        lengths.add_turn(0, 350)
        lengths.add_turn(1, 2050)
    assert lengths.estimate_turn_tokens(0, 0, 0.9) < 500
    assert lengths.estimate_turn_tokens(1, 0, 0.9) > 2000


def test_the_turn_estimate_counts_from_the_start_of_the_turn() -> None:
    expectations, ledger = LearnedLengthForecast(LIMIT), Ledger()
    ledger.add_engine(joined(0, 100_000))
    engine = ledger.engines["generator-0"]

    def turn(holding: KvAccount, tokens: int) -> None:
        ledger.grant_lease(holding, engine, 10_000)
        expectations.on_leased(holding)
        expectations.on_turn_ended(ledger.mark_idle(holding.trajectory_id, tokens))

    for tid in range(600):
        turn(ledger.enqueue_request(request(tid), "r", 0.0), PROMPT + 40)
        turn(ledger.enqueue_request(request(tid, tokens=PROMPT + 50, turn=1, lease=2), "r", 0.0), PROMPT + 52)
        expectations.on_trajectory_ended(ledger.close_account(tid, PROMPT + 52))
    new = ledger.enqueue_request(request(9999), "r", 0.0)
    assert expectations.estimate_turn_tokens(new, 0.9) == 100  # the end of the first bin
    assert expectations.estimate_final_tokens(new) == pytest.approx(PROMPT + 52, abs=50)


def test_trajectories_that_were_aborted_before_their_start_do_not_count() -> None:
    expectations, ledger = LearnedLengthForecast(LIMIT), Ledger()
    before = expectations.estimate_final_tokens(ledger.enqueue_request(request(9999, 7), "r", 0.0))
    for tid in range(64):
        ledger.enqueue_request(request(tid, 7), "r", 0.0)
        expectations.on_trajectory_ended(ledger.close_account(tid, PROMPT))
    assert expectations.estimate_final_tokens(ledger.accounts[9999]) == before


def test_a_group_with_dropped_statistics_gets_the_estimate_over_all_groups() -> None:
    lengths = LengthStats(LIMIT)
    lengths.update_expected_tokens(0, None, 6000.0)
    for group in range(1, 8193):
        lengths.update_expected_tokens(group, None, 3000.0)
    lengths.update_expected_tokens(0, 6000.0, 100.0)
    assert lengths.estimate_final_tokens(0, 0) == lengths.estimate_final_tokens(-1, 0)
    assert (lengths.survival_curve(0, 0) == lengths.survival_curve(-1, 0)).all()
