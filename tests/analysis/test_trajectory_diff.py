"""The first divergence of two continuations, and the difference of logprobs before the divergence."""

from array import array

import pytest

from asterism.analysis.trajectory_diff import TokenDivergence, build_outcome, compare, find_turn_spans
from asterism.bus.messages import TokenRecord, TrajectoryAborted, TrajectoryFailed, ids_to_bytes
from asterism.policies.rollout.trajectory import Trajectory
from tests.fakes import TOKENIZER
from tests.recorded import GROUP, TID, replay_recorded

# Two tokens of the prompt, three of turn 0, two of a tool result, and two of turn 1.
MASK = [0, 0, 1, 1, 1, 0, 0, 1, 1]


def record(ids: list[int], mask: list[int] = MASK, logprob: float = -1.0) -> TokenRecord:
    count = len(ids)
    logprobs = array("f", [logprob * flag for flag in mask[:count]]).tobytes()
    return TokenRecord(2, ids_to_bytes(ids), bytes(mask[:count]), logprobs, bytes(4 * count))


def changed(position: int) -> TokenRecord:
    ids = list(range(9))
    ids[position] = 99
    return record(ids)


def test_equal_tokens_do_not_diverge() -> None:
    same = compare(record(list(range(9))), record(list(range(9)), logprob=-1.5), 2)
    assert (same.same, same.common_tokens, same.divergence) == (True, 9, None)
    assert same.logprob_difference_max == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("position", "within", "turn", "token"),
    [(2, "turn", 0, 0), (4, "turn", 0, 2), (5, "result", 1, 0), (6, "result", 1, 1), (8, "turn", 1, 1)],
)
def test_the_first_different_token_is_located_in_its_turn(position: int, within: str, turn: int, token: int) -> None:
    compared = compare(record(list(range(9))), changed(position), 2)
    assert compared.divergence == TokenDivergence(within, turn, token, position)  # pyright: ignore[reportArgumentType]
    assert (compared.same, compared.common_tokens) == (False, position)


def test_a_prefix_differs_from_the_whole_without_a_divergence() -> None:
    compared = compare(record(list(range(9))), record(list(range(6))), 2)
    assert (compared.same, compared.common_tokens, compared.divergence) == (False, 6, None)


def test_without_common_generated_tokens_there_is_no_logprob_difference() -> None:
    assert compare(record(list(range(9))), changed(7), 7).logprob_difference_max is None


def test_each_turn_has_a_span() -> None:
    assert find_turn_spans(bytes(MASK)) == [(2, 5), (7, 9)]
    assert find_turn_spans(bytes(3)) == []


def test_an_outcome_has_the_text_and_tool_results_of_each_turn() -> None:
    whole = replay_recorded()
    outcome = build_outcome(TOKENIZER, whole.final, whole.end)
    assert [turn.turn for turn in outcome.turn_texts] == [0, 1, 2]
    assert outcome.turn_texts[0].given == ""
    assert "seven" in outcome.turn_texts[1].given
    assert "boxed{2}" in outcome.turn_texts[2].generated
    assert (outcome.reward, outcome.ending, outcome.calls) == (1.0, "answered", 3)


def test_failed_and_aborted_trajectories_have_no_reward() -> None:
    last: Trajectory = replay_recorded().final
    lost = build_outcome(TOKENIZER, last, TrajectoryFailed(TID, GROUP.group_id, "sandbox: gone"))
    assert (lost.reward, lost.ending, lost.infrastructure_failed) == (None, "failed: sandbox: gone", True)
    aborted = build_outcome(TOKENIZER, last, TrajectoryAborted(TID, GROUP.group_id, "not needed", 3))
    assert (aborted.reward, aborted.ending, aborted.infrastructure_failed) == (None, "aborted: not needed", False)
    assert build_outcome(TOKENIZER, last, None).ending == "not in the log: ended"
