"""Where two courses of a trajectory part, and how far their logprobs stray before that."""

from __future__ import annotations

from array import array

import pytest

from bus.messages import TrajectoryAborted, TrajectoryFailed
from policies.parting import Parting, compare, outcome_of, stretches
from policies.record import Record, ids_to_bytes
from policies.trajectory import Trajectory
from tests.fakes import TOKENIZER
from tests.policies.test_history import GROUP, TID, course, history

# Two prompt tokens; turn 0: three; given: two; turn 1: two.
MASK = [0, 0, 1, 1, 1, 0, 0, 1, 1]


def record(ids: list[int], mask: list[int] = MASK, logprob: float = -1.0) -> Record:
    count = len(ids)
    logprobs = array("f", [logprob * flag for flag in mask[:count]]).tobytes()
    return Record(2, ids_to_bytes(ids), bytes(mask[:count]), logprobs, bytes(4 * count))


def changed(position: int) -> Record:
    ids = list(range(9))
    ids[position] = 99
    return record(ids)


def test_the_same_tokens_part_nowhere() -> None:
    same = compare(record(list(range(9))), record(list(range(9)), logprob=-1.5), 2)
    assert (same.same, same.common_tokens, same.parting) == (True, 9, None)
    assert same.logprob_difference_max == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("position", "within", "turn", "token"),
    [(2, "turn", 0, 0), (4, "turn", 0, 2), (5, "result", 1, 0), (6, "result", 1, 1), (8, "turn", 1, 1)],
)
def test_the_first_token_that_differs_is_named_by_its_turn(position: int, within: str, turn: int, token: int) -> None:
    compared = compare(record(list(range(9))), changed(position), 2)
    assert compared.parting == Parting(within, turn, token, position)  # pyright: ignore[reportArgumentType]
    assert (compared.same, compared.common_tokens) == (False, position)


def test_one_that_ends_before_the_other_parts_nowhere_and_is_not_the_same() -> None:
    compared = compare(record(list(range(9))), record(list(range(6))), 2)
    assert (compared.same, compared.common_tokens, compared.parting) == (False, 6, None)


def test_where_nothing_common_was_generated_no_logprob_strays() -> None:
    assert compare(record(list(range(9))), changed(7), 7).logprob_difference_max is None


def test_a_stretch_for_each_turn() -> None:
    assert stretches(bytes(MASK)) == [(2, 5), (7, 9)]
    assert stretches(bytes(3)) == []


def test_an_outcome_tells_each_turn_and_what_was_given_before_it() -> None:
    whole = course(history())
    outcome = outcome_of(TOKENIZER, whole.last, whole.end)
    assert [turn.turn for turn in outcome.told] == [0, 1, 2]
    assert outcome.told[0].given == ""
    assert "seven" in outcome.told[1].given
    assert "boxed{2}" in outcome.told[2].said
    assert (outcome.reward, outcome.ending, outcome.calls) == (1.0, "answered", 3)


def test_what_infrastructure_lost_has_no_reward() -> None:
    last: Trajectory = course(history()).last
    lost = outcome_of(TOKENIZER, last, TrajectoryFailed(TID, GROUP.group_id, "sandbox: gone"))
    assert (lost.reward, lost.ending, lost.infrastructure_failed) == (None, "failed: sandbox: gone", True)
    aborted = outcome_of(TOKENIZER, last, TrajectoryAborted(TID, GROUP.group_id, "not needed", 3))
    assert (aborted.reward, aborted.ending, aborted.infrastructure_failed) == (None, "aborted: not needed", False)
    assert outcome_of(TOKENIZER, last, None).ending == "none in the log: ended"
