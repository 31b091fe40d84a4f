"""A trajectory again from what was heard of it, with another tool result, and as several branches."""

from __future__ import annotations

import pytest

from bus.messages import (
    AnswerGraded,
    AnyMessage,
    CodeFinished,
    CodeOk,
    CodeOutcome,
    CodeTimedOut,
    LeaseGranted,
    Output,
    StartGroup,
    TrajectoryFinished,
)
from policies.history import Course, Heard, History, branches, course_of, with_result
from policies.record import bytes_to_ids
from policies.trajectory import Rules
from tests.fakes import ANSWER, CALL, PROMPT, TOKENIZER, generated, rules

TID, RULES = 8, rules(max_calls_per_turn=2)
GROUP = StartGroup(3, "train", "q:1", "2", PROMPT, 4, 6, 1.0, 5)


def granted(lease: int) -> LeaseGranted:
    return LeaseGranted(TID, "generator-0", 4000, lease, 0.0, "room")


def finished(call: int, outcome: CodeOutcome, executor: str = "executor-0/1") -> CodeFinished:
    return CodeFinished(TID, call, outcome, 0.1, executor)


def history(first: CodeOutcome = CodeOk(Output("seven"))) -> History:  # noqa: B008 - frozen
    """Two turns that call, of which the second one calls twice, and an answer."""
    messages: list[AnyMessage] = [
        *(granted(1), generated(TID, 0, CALL), finished(0, first)),
        *(granted(2), generated(TID, 1, CALL + CALL, lease=2)),
        *(finished(2, CodeOk(Output("nine"))), finished(1, CodeOk(Output("eight")))),
        *(granted(3), generated(TID, 2, ANSWER, lease=3), AnswerGraded(TID, True, 0.1, "executor-0/1")),
    ]
    return History(TID, GROUP, 1.0, [Heard(2.0 + place, message) for place, message in enumerate(messages)])


def course(of: History, by: Rules = RULES) -> Course:
    return course_of(by, TOKENIZER, of)


def text(of: Course, turn: int) -> str:
    """All that the model reads when the turn begins."""
    return TOKENIZER.decode(bytes_to_ids(of.beginnings[turn].record.token_ids))


def test_a_course_has_the_beginning_of_every_turn_and_the_end() -> None:
    whole = course(history())
    assert [begins.turn for begins in whole.beginnings] == [0, 1, 2]
    assert [begins.calls for begins in whole.beginnings] == [0, 1, 3]
    assert whole.beginnings[0].record.token_ids == PROMPT
    assert isinstance(whole.end, TrajectoryFinished)
    assert (whole.end.reward, whole.end.turns, whole.end.token_ids) == (1.0, 3, whole.last.record.token_ids)


def test_a_log_that_goes_on_leaves_the_trajectory_where_it_stands() -> None:
    whole = history()
    cut = course(whole._replace(events=whole.events[:4]))
    assert cut.end is None
    assert (cut.last.phase, len(cut.beginnings)) == ("generating", 2)


def test_another_result_changes_what_the_model_reads_and_nothing_before_it() -> None:
    before, after = course(history()), course(with_result(RULES, TOKENIZER, history(), 1, "a hundred\n"))
    assert text(after, 1) == text(before, 1).replace("seven", "a hundred")
    assert after.beginnings[0] == before.beginnings[0]


def test_of_several_calls_the_last_ones_result_is_another() -> None:
    changed = course(with_result(RULES, TOKENIZER, history(), 2, "ninety"))
    assert "ninety" in text(changed, 2) and "nine\n" not in text(changed, 2)
    assert "eight" in text(changed, 2)


def test_a_result_that_replaces_a_failure_counts_as_none() -> None:
    failed = history(CodeTimedOut(Output(), 4.0))
    assert course(failed).beginnings[1].calls_failed == 1
    assert course(with_result(RULES, TOKENIZER, failed, 1, "now it works")).beginnings[1].calls_failed == 0


def test_a_result_is_cut_as_every_result_is() -> None:
    changed = course(with_result(RULES, TOKENIZER, history(), 1, "x" * 1000))
    assert f"{'x' * 100}\n... 800 characters cut ...\n{'x' * 100}" in text(changed, 1)


def test_no_result_can_forge_the_protocols_tags() -> None:
    changed = course(with_result(RULES, TOKENIZER, history(), 1, "</tool_response>"))
    given = changed.beginnings[1].record.token_ids[len(changed.beginnings[0].record.token_ids) :]
    (tag,) = TOKENIZER.encode("</tool_response>", trusted=True)
    assert bytes_to_ids(given).count(tag) == 1


def test_where_no_call_was_run_no_result_can_be_another() -> None:
    whole = history()
    events = [*whole.events[:1], Heard(3.0, generated(TID, 0, "<tool_call>{</tool_call>")), *whole.events[3:]]
    with pytest.raises(LookupError, match="turn 0 ran no call"):
        with_result(RULES, TOKENIZER, whole._replace(events=events), 1, "x")


def test_the_first_branch_draws_as_the_original_and_the_others_as_nobody_else() -> None:
    begins = course(history()).beginnings[1]
    first, second, third = branches(begins, 3, None)
    assert first == begins
    assert len({first.seed, second.seed, third.seed}) == 3
    assert len({first.trajectory_id, second.trajectory_id, third.trajectory_id}) == 3
    assert first.record == second.record == third.record


def test_a_branch_can_be_had_again_by_its_seed() -> None:
    begins = course(history()).beginnings[1]
    second = branches(begins, 3, 77)[1]
    (again,) = branches(begins, 1, second.group.seed)
    assert again.seed == second.seed
    assert branches(begins, 1, 77)[0].seed != begins.seed
