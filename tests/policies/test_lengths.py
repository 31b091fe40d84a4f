"""What the run's own lengths say of those to come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import lengths as lengths_module
from policies.expectations import Expectations
from policies.ledger import Holding, Ledger
from policies.lengths import Histogram, Lengths
from tests.policies.leases import PROMPT, joined, request

LIMIT = 6400


def seen(*tokens: int, times: int) -> Lengths:
    """Trajectories of one turn that have got so long, one length after the other."""
    lengths = Lengths(LIMIT)
    for each in tokens:
        for _ in range(times):
            lengths.turn_ended(0, each)
            lengths.trajectory_ended(0, each)
    return lengths


def test_before_anything_is_known_all_lengths_are_as_likely() -> None:
    assert Lengths(LIMIT).alone(0) == pytest.approx(LIMIT / 2)
    assert Histogram(LIMIT).quantile_beyond(0, 0.9) == pytest.approx(0.9 * LIMIT, abs=LIMIT / 64)


def test_what_has_been_seen_outweighs_the_prior() -> None:
    lengths = seen(950, times=1000)
    assert lengths.alone(0) == pytest.approx(950, abs=100)
    assert 950 <= lengths.turn_tokens(0, 0, 0.9) <= 1050


def test_one_that_is_longer_than_all_is_expected_beyond_where_it_is() -> None:
    lengths = seen(950, times=1000)
    assert lengths.alone(3000) > 3000
    assert lengths.turn_tokens(0, 3000, 0.5) > 3000


def test_half_of_the_weight_is_forgotten_in_a_half_life() -> None:
    lengths = seen(950, 5050, times=4096)
    old, new = 0.5, 1.0
    assert lengths.alone(0) == pytest.approx((950 * old + 5050 * new) / 1.5, rel=0.01)
    assert lengths.turn_tokens(0, 0, 0.3) < 1100
    assert lengths.turn_tokens(0, 0, 0.37) > 5000


def test_a_turn_length_that_nobody_has_had_for_long_stays_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths_module, "_HALF_LIFE", 8.0)
    histogram = Histogram(LIMIT)
    for _ in range(10_000):
        histogram.add(50)
    assert histogram.quantile_beyond(0, 0.5) == 100
    assert 5000 < histogram.quantile_beyond(5000, 0.5) < LIMIT


@given(st.lists(st.integers(0, LIMIT + 10), max_size=50), st.integers(0, LIMIT), st.floats(0.01, 1))
def test_an_estimate_lies_between_what_is_there_and_the_limit(seen: list[int], so_far: int, share: float) -> None:
    lengths = Lengths(LIMIT)
    for number, tokens in enumerate(seen):
        lengths.turn_ended(number % 12, tokens)
        lengths.trajectory_ended(0, tokens)
        lengths.expect(number % 3, None, tokens)
    assert min(so_far + 1, LIMIT) <= lengths.final_tokens(1, so_far) <= LIMIT
    assert min(so_far + 1, LIMIT) <= lengths.turn_tokens(2, so_far, share) <= LIMIT


def test_a_group_is_expected_to_get_as_long_as_its_siblings() -> None:
    lengths = Lengths(LIMIT)
    for group in range(100):
        for _ in range(8):
            tokens = 500 if group else 4000
            lengths.trajectory_ended(0, tokens)
            lengths.expect(group, None, tokens)
    assert lengths.final_tokens(0, 0) > 4 * lengths.final_tokens(1, 0)
    assert lengths.final_tokens(1, 0) < lengths.final_tokens(777, 0) * 1.1


def test_a_group_whose_long_members_still_run_does_not_look_short() -> None:
    lengths = Lengths(LIMIT)
    for _ in range(500):
        lengths.trajectory_ended(0, 1000)
        lengths.trajectory_ended(0, 5000)
    for member in range(8):
        lengths.expect(0, None, lengths.alone(0))
        if member < 4:
            lengths.expect(0, lengths.alone(0), 1000.0)  # has ended
        else:
            lengths.expect(0, lengths.alone(0), lengths.alone(3000))  # has come so far
    assert lengths.alone(3000) == pytest.approx(5000, rel=0.05)
    assert lengths.final_tokens(0, 0) == pytest.approx(lengths.alone(0), rel=0.1)


def test_turns_are_told_apart_by_their_number() -> None:
    lengths = Lengths(LIMIT)
    for _ in range(500):
        lengths.turn_ended(0, 350)
        lengths.turn_ended(1, 2050)
    assert lengths.turn_tokens(0, 0, 0.9) < 500
    assert lengths.turn_tokens(1, 0, 0.9) > 2000


def test_what_is_expected_of_a_trajectory_counts_its_turn_from_where_it_began() -> None:
    expectations, ledger = Expectations(LIMIT), Ledger()
    ledger.join(joined(0, 100_000))
    engine = ledger.engines["generator-0"]

    def turn(holding: Holding, tokens: int) -> None:
        ledger.lease(holding, engine, 10_000)
        expectations.leased(holding)
        expectations.turn_ended(ledger.park(holding.trajectory_id, tokens))

    for tid in range(600):
        turn(ledger.request(request(tid), "r", 0.0), PROMPT + 40)
        turn(ledger.request(request(tid, tokens=PROMPT + 50, turn=1, lease=2), "r", 0.0), PROMPT + 52)
        expectations.ended(ledger.release(tid, PROMPT + 52))
    new = ledger.request(request(9999), "r", 0.0)
    assert expectations.turn_tokens(new, 0.9) == 100  # the first bin's end
    assert expectations.final_tokens(new) == pytest.approx(PROMPT + 52, abs=50)


def test_one_that_was_given_up_before_it_was_begun_says_nothing_of_lengths() -> None:
    expectations, ledger = Expectations(LIMIT), Ledger()
    before = expectations.final_tokens(ledger.request(request(9999, 7), "r", 0.0))
    for tid in range(64):
        ledger.request(request(tid, 7), "r", 0.0)
        expectations.ended(ledger.release(tid, PROMPT))
    assert expectations.final_tokens(ledger.holdings[9999]) == before


def test_a_group_that_is_too_old_to_be_remembered_is_taken_for_any_other() -> None:
    lengths = Lengths(LIMIT)
    lengths.expect(0, None, 6000.0)
    for group in range(1, 8193):
        lengths.expect(group, None, 3000.0)
    lengths.expect(0, 6000.0, 100.0)
    assert lengths.final_tokens(0, 0) == lengths.final_tokens(-1, 0)
    assert (lengths.alive(0, 0) == lengths.alive(-1, 0)).all()
