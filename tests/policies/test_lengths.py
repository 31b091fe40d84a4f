"""What the run's own lengths say of those to come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.expectations import Expectations
from policies.ledger import Holding, Ledger
from policies.lengths import Histogram, Lengths
from tests.policies.leases import PROMPT, joined, request

LIMIT = 6400


def test_before_anything_is_known_all_lengths_are_as_likely() -> None:
    histogram = Histogram(LIMIT)
    assert histogram.mean_beyond(0) == pytest.approx(LIMIT / 2)
    assert histogram.quantile_beyond(0, 0.9) == pytest.approx(0.9 * LIMIT, abs=LIMIT / 64)


def test_what_has_been_seen_outweighs_the_prior() -> None:
    histogram = Histogram(LIMIT)
    for _ in range(1000):
        histogram.add(950)
    assert histogram.mean_beyond(0) == pytest.approx(950, abs=100)
    assert 950 <= histogram.quantile_beyond(0, 0.9) <= 1050


def test_one_that_is_longer_than_all_is_expected_beyond_where_it_is() -> None:
    histogram = Histogram(LIMIT)
    for _ in range(1000):
        histogram.add(950)
    assert histogram.mean_beyond(3000) > 3000
    assert histogram.quantile_beyond(3000, 0.5) > 3000


def test_half_of_the_weight_is_forgotten_in_a_half_life() -> None:
    histogram = Histogram(LIMIT)
    for length in (950, 5050):
        for _ in range(4096):
            histogram.add(length)
    old, new = 0.5, 1.0
    assert histogram.mean_beyond(0) == pytest.approx((950 * old + 5050 * new) / 1.5, rel=0.01)


def test_a_length_that_nobody_has_had_for_long_stays_possible() -> None:
    histogram = Histogram(LIMIT)
    for _ in range(400_000):
        histogram.add(50)
    assert histogram.mean_beyond(0) == pytest.approx(50, abs=51)
    assert 5000 < histogram.mean_beyond(5000) <= LIMIT


def test_while_few_have_ended_those_under_way_count_as_longer_than_they_are() -> None:
    histogram = Histogram(LIMIT)
    for _ in range(100):
        histogram.add(950)
    for tokens in (450, 2050):
        for _ in range(300):
            histogram.went_on(None, tokens)
    assert histogram.quantile_beyond(0, 0.2) == 1000  # a quarter of those that came so far ended there
    assert histogram.quantile_beyond(0, 0.3) > 2000


def test_when_many_have_ended_they_alone_tell_the_lengths() -> None:
    histogram = Histogram(LIMIT)
    for _ in range(150):
        histogram.went_on(None, 2050)
    for _ in range(100):
        histogram.went_on(2050, 3050)
        histogram.add(950)
    assert histogram.mean_beyond(0) == pytest.approx(950, abs=100)


@given(
    st.lists(st.integers(0, LIMIT + 10), max_size=50),
    st.lists(st.integers(0, LIMIT), max_size=50),
    st.integers(0, LIMIT),
    st.floats(0.01, 1),
)
def test_an_estimate_lies_between_what_is_there_and_the_limit(
    seen: list[int], under_way: list[int], so_far: int, share: float
) -> None:
    lengths = Lengths(LIMIT)
    for tokens in under_way:
        lengths.went_on(None, tokens)
    for number, tokens in enumerate(seen):
        lengths.turn_ended(number % 12, tokens)
        lengths.trajectory_ended(tokens)
        lengths.expect(number % 3, None, tokens)
    assert min(so_far + 1, LIMIT) <= lengths.final_tokens(1, so_far) <= LIMIT
    assert min(so_far + 1, LIMIT) <= lengths.turn_tokens(2, so_far, share) <= LIMIT


def test_a_group_is_expected_to_get_as_long_as_its_siblings() -> None:
    lengths = Lengths(LIMIT)
    for group in range(100):
        for _ in range(8):
            tokens = 500 if group else 4000
            lengths.trajectory_ended(tokens)
            lengths.expect(group, None, tokens)
    assert lengths.final_tokens(0, 0) > 4 * lengths.final_tokens(1, 0)
    assert lengths.final_tokens(1, 0) < lengths.final_tokens(777, 0) * 1.1


def test_a_group_whose_long_members_still_run_does_not_look_short() -> None:
    lengths = Lengths(LIMIT)
    for _ in range(500):
        lengths.trajectory_ended(1000)
        lengths.trajectory_ended(5000)
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
        expectations.turn_ended(ledger.park(holding.trajectory_id, tokens))

    for tid in range(200):
        turn(ledger.request(request(tid), "r", 0.0), PROMPT + 40)
        turn(ledger.request(request(tid, tokens=PROMPT + 50, turn=1, lease=2), "r", 0.0), PROMPT + 52)
        expectations.ended(ledger.release(tid, PROMPT + 52))
    new = ledger.request(request(999), "r", 0.0)
    assert expectations.turn_tokens(new, 0.9) == 100  # the first bin's end
    assert expectations.final_tokens(new) == pytest.approx(PROMPT + 52, abs=50)


def test_a_new_one_is_expected_to_get_as_long_as_those_that_run_on_while_only_short_ones_have_ended() -> None:
    expectations, ledger = Expectations(LIMIT), Ledger()
    ledger.join(joined(0, 1_000_000))
    engine = ledger.engines["generator-0"]

    def goes_on(tid: int, tokens: int) -> None:
        expectations.asked(ledger.request(request(tid, tokens=tokens, turn=1, lease=2, response=LIMIT), "r", 0.0))

    for tid in range(100):
        ledger.lease(ledger.request(request(tid, response=LIMIT), "r", 0.0), engine, 10_000)
        ledger.park(tid, PROMPT + 40)
        goes_on(tid, PROMPT + 3050 if tid % 8 else PROMPT + 50)
    new = ledger.request(request(999, response=LIMIT), "r", 0.0)
    for tid in range(0, 100, 8):
        expectations.ended(ledger.release(tid, PROMPT + 90))
    assert expectations.final_tokens(new) > PROMPT + 3050
    for tid in (tid for tid in range(100) if tid % 8):
        expectations.ended(ledger.release(tid, PROMPT + 3090))
    assert expectations.final_tokens(new) == pytest.approx(PROMPT + (90 + 7 * 3090) / 8, rel=0.03)
