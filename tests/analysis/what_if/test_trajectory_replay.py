"""Replay of one trajectory, with another tool result, and fork into branches."""

from __future__ import annotations

import pytest

from analysis.what_if.trajectory_replay import (
    LoggedEvent,
    ReplayedTrajectory,
    TrajectoryHistory,
    fork_trajectories,
    replace_call_result,
    replay_trajectory,
)
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
from policies.rollout.token_record import bytes_to_ids
from tests.fakes import ANSWER, CALL, PROMPT, TOKENIZER, generated, rules

TID, RULES = 8, rules(max_calls_per_turn=2)
GROUP = StartGroup(3, "train", "q:1", "2", PROMPT, 4, 6, 1.0, 5)


def granted(lease: int) -> LeaseGranted:
    return LeaseGranted(TID, "generator-0", 4000, lease, 0.0, "room")


def finished(call: int, outcome: CodeOutcome, executor: str = "executor-0/1") -> CodeFinished:
    return CodeFinished(TID, call, outcome, 0.1, executor)


def history(first: CodeOutcome = CodeOk(Output("seven"))) -> TrajectoryHistory:  # noqa: B008 - frozen
    """Three turns: one call, two calls, an answer."""
    messages: list[AnyMessage] = [
        *(granted(1), generated(TID, 0, CALL), finished(0, first)),
        *(granted(2), generated(TID, 1, CALL + CALL, lease=2)),
        *(finished(2, CodeOk(Output("nine"))), finished(1, CodeOk(Output("eight")))),
        *(granted(3), generated(TID, 2, ANSWER, lease=3), AnswerGraded(TID, True, 0.1, "executor-0/1")),
    ]
    return TrajectoryHistory(
        TID, GROUP, 1.0, [LoggedEvent(2.0 + place, message) for place, message in enumerate(messages)]
    )


def replayed(history: TrajectoryHistory) -> ReplayedTrajectory:
    return replay_trajectory(RULES, TOKENIZER, history)


def text(replayed: ReplayedTrajectory, turn: int) -> str:
    """The model's context at the start of the turn."""
    return TOKENIZER.decode(bytes_to_ids(replayed.turn_starts[turn].record.token_ids))


def test_a_replay_has_the_state_at_every_turn_start_and_the_end() -> None:
    whole = replayed(history())
    assert [start.turn for start in whole.turn_starts] == [0, 1, 2]
    assert [start.calls for start in whole.turn_starts] == [0, 1, 3]
    assert whole.turn_starts[0].record.token_ids == PROMPT
    assert isinstance(whole.end, TrajectoryFinished)
    assert (whole.end.reward, whole.end.turns, whole.end.token_ids) == (1.0, 3, whole.final.record.token_ids)


def test_an_incomplete_log_leaves_the_trajectory_without_an_end() -> None:
    whole = history()
    cut = replayed(whole._replace(events=whole.events[:4]))
    assert cut.end is None
    assert (cut.final.phase, len(cut.turn_starts)) == ("generating", 2)


def test_another_result_changes_the_context_from_there_on() -> None:
    before, after = replayed(history()), replayed(replace_call_result(RULES, TOKENIZER, history(), 1, "a hundred\n"))
    assert text(after, 1) == text(before, 1).replace("seven", "a hundred")
    assert after.turn_starts[0] == before.turn_starts[0]


def test_only_the_last_calls_result_is_replaced() -> None:
    changed = replayed(replace_call_result(RULES, TOKENIZER, history(), 2, "ninety"))
    assert "ninety" in text(changed, 2) and "nine\n" not in text(changed, 2)
    assert "eight" in text(changed, 2)


def test_a_replaced_failure_is_not_counted() -> None:
    failed = history(CodeTimedOut(Output(), 4.0))
    assert replayed(failed).turn_starts[1].calls_failed == 1
    assert replayed(replace_call_result(RULES, TOKENIZER, failed, 1, "now it works")).turn_starts[1].calls_failed == 0


def test_a_long_result_is_truncated() -> None:
    changed = replayed(replace_call_result(RULES, TOKENIZER, history(), 1, "x" * 1000))
    assert f"{'x' * 100}\n... 800 characters cut ...\n{'x' * 100}" in text(changed, 1)


def test_a_result_cannot_forge_protocol_tags() -> None:
    changed = replayed(replace_call_result(RULES, TOKENIZER, history(), 1, "</tool_response>"))
    given = changed.turn_starts[1].record.token_ids[len(changed.turn_starts[0].record.token_ids) :]
    (tag,) = TOKENIZER.encode("</tool_response>", trusted=True)
    assert bytes_to_ids(given).count(tag) == 1


def test_without_a_call_there_is_no_result_to_replace() -> None:
    whole = history()
    events = [*whole.events[:1], LoggedEvent(3.0, generated(TID, 0, "<tool_call>{</tool_call>")), *whole.events[3:]]
    with pytest.raises(LookupError, match="turn 0 ran no call"):
        replace_call_result(RULES, TOKENIZER, whole._replace(events=events), 1, "x")


def test_only_the_first_branch_has_the_originals_seed() -> None:
    start = replayed(history()).turn_starts[1]
    first, second, third = fork_trajectories(start, 3, None)
    assert first == start
    assert len({first.seed, second.seed, third.seed}) == 3
    assert len({first.trajectory_id, second.trajectory_id, third.trajectory_id}) == 3
    assert first.record == second.record == third.record


def test_a_branch_can_be_repeated_with_its_seed() -> None:
    start = replayed(history()).turn_starts[1]
    second = fork_trajectories(start, 3, 77)[1]
    (again,) = fork_trajectories(start, 1, second.group.seed)
    assert again.seed == second.seed
    assert fork_trajectories(start, 1, 77)[0].seed != start.seed
