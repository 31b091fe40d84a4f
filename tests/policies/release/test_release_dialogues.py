"""Penalties, calls and rewards of the preset "rstar2_release" and of the release, for every golden dialogue."""

import logging
from collections.abc import Callable, Iterator

import pytest

from asterism.bus.messages import ReleaseCounts
from asterism.configs.schema.algorithm import RocConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.parse_turn import MalformedCall, ToolCall, parse_assistant_turn
from asterism.policies.dialogue.release_text import count_release_marks, find_response_answer
from asterism.policies.groups.roc import compute_error_penalty, compute_format_penalty, compute_penalty
from asterism.policies.rollout.call_transitions import select_calls
from asterism.sandbox.grading.rewriting import rewrite
from asterism.sandbox.inside.grader import compare_parsed, parse_math
from asterism.sandbox.pool.answer_checks import judge_answer
from asterism.tasks.math_python import MATH_PYTHON
from tests.policies.groups.finished import finished
from tests.policies.release.golden import Dialogue, list_documented_rows, read_dialogues

DIALOGUES = read_dialogues()
CONFIG = DialogueConfig(unclosed_call="ignore", surplus_calls="ignore", graded_text="response")
FORMAT = build_dialogue_format(CONFIG, MATH_PYTHON)


def list_different(agrees: Callable[[Dialogue], bool]) -> set[str]:
    return {row.id for row in DIALOGUES if not agrees(row)}


def count_marks(row: Dialogue) -> ReleaseCounts:
    return count_release_marks(row.response_text, FORMAT)


def parse_turns(row: Dialogue) -> Iterator[tuple[ToolCall | MalformedCall, ...]]:
    for begin, end in row.turns:
        yield parse_assistant_turn(row.response_text[begin:end], FORMAT).calls


def is_malformed(call: ToolCall | MalformedCall) -> bool:
    return isinstance(call, MalformedCall) and not call.is_decoded


def count_executed_calls(row: Dialogue) -> int:
    """Count the calls that a tool receives: the turn limit ends a dialogue before the calls of its last turn."""
    config = DialogueConfig(surplus_calls="ignore", max_calls_per_turn=row.max_calls)
    turns = list(parse_turns(row))[: row.max_turns - 1]
    return sum(not is_malformed(call) for calls in turns for call in select_calls(config, calls))


def grade(row: Dialogue) -> float:
    """Grade the row's answer in the way of the sandbox with reward.accept = "any"."""
    answer = find_response_answer(row.response_text, FORMAT)
    if answer is None:
        return 0.0
    verdict = judge_answer(answer, row.ground_truth, "any")
    if verdict is None:
        verdict = compare_parsed(parse_math(rewrite(answer).text), parse_math(rewrite(row.ground_truth).text))
    return float(verdict)


def test_the_golden_table_has_all_rows() -> None:
    assert len({row.id for row in DIALOGUES}) == 217


def test_the_counts_of_a_response_equal_those_of_the_release() -> None:
    def agrees(row: Dialogue) -> bool:
        counts = count_marks(row)
        ours = (counts.tool_responses, counts.responses_with_error, counts.answer_spans, counts.turns)
        return ours == (row.tool_responses, row.responses_with_error, row.answer_spans, row.format_turns)

    assert list_different(agrees) == set()


def test_both_penalties_equal_those_of_the_release() -> None:
    def agrees(row: Dialogue) -> bool:
        trajectory = finished(0, row.reward, release=count_marks(row))
        ours = compute_error_penalty(trajectory, "release"), compute_format_penalty(trajectory, "release")
        total = compute_penalty(trajectory, RocConfig(penalty="release"))
        return (*ours, total) == (row.p_err, row.p_format, row.p_err + row.p_format)

    assert list_different(agrees) == set()


def test_exactly_the_documented_calls_differ_from_those_of_the_release() -> None:
    def agrees(row: Dialogue) -> bool:
        malformed = [sum(map(is_malformed, calls)) for calls in parse_turns(row)]
        parsed = [len(calls) - wrong for calls, wrong in zip(parse_turns(row), malformed, strict=True)]
        return (tuple(parsed), tuple(malformed)) == (row.parsed, row.malformed)

    assert list_different(agrees) == list_documented_rows("Calls that differ")


def test_a_tool_receives_as_many_calls_as_in_the_release() -> None:
    different = list_different(lambda row: count_executed_calls(row) == row.executed_calls)
    assert different == list_documented_rows("Calls that differ")


@pytest.mark.slow
def test_exactly_the_documented_rewards_differ_from_those_of_the_release() -> None:
    logging.disable(logging.WARNING)  # math-verify warns that its timeouts are off
    try:
        different = list_different(lambda row: grade(row) == row.reward)
    finally:
        logging.disable(logging.NOTSET)
    assert different == list_documented_rows("Rewards that differ")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", ReleaseCounts(0, 0, 0, 0, 0, 0)),
        ("</answer> x <answer>", ReleaseCounts(0, 0, 1, 1, 0, 0)),
        ("<answer><answer>x</answer></answer>", ReleaseCounts(0, 0, 2, 2, 1, 0)),
        ("<answer>a<|im_end|>\n<|im_start|>assistant\n</answer><|im_end|>", ReleaseCounts(0, 0, 1, 1, 1, 1)),
        ("<tool_response>No eRRor</tool_response><tool_response>", ReleaseCounts(1, 1, 0, 0, 0, 0)),
    ],
)
def test_the_blocks_of_a_response_are_the_shortest_matches_in_the_whole_text(text: str, counts: ReleaseCounts) -> None:
    assert count_release_marks(text, FORMAT) == counts


@pytest.mark.parametrize("boxed", [True, False])
def test_the_answer_of_a_response_is_its_last_box_or_else_its_last_block(boxed: bool) -> None:
    description = MATH_PYTHON if boxed else type(MATH_PYTHON)("tools")
    dialogue = build_dialogue_format(CONFIG, description)
    assert find_response_answer("\\boxed{1} <answer>\\boxed{2}</answer> \\boxed{3}", dialogue) == "3"
    assert find_response_answer("<answer> 4 </answer>", dialogue) == (None if boxed else "4")
    assert find_response_answer("nothing", dialogue) is None
