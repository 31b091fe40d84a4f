"""Tool calls and answers, parsed from assistant turns."""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import CALL_FORMATS, build_dialogue_format
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.policies.dialogue.parse_turn import AssistantTurn, MalformedCall, ToolCall, parse_assistant_turn
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks.math_python import MATH_PYTHON

FORMAT = build_dialogue_format(DialogueConfig(), MATH_PYTHON)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALL_FORMATS)
@example("[" * 1000 + '\\" {' * 100, "")  # brackets in a string do not nest
@given(st.text(), st.text())
def test_parsing_restores_a_formatted_call(name: str, code: str, stdin: str) -> None:
    dialogue = build_dialogue_format(DialogueConfig(tool_call_format=name), MATH_PYTHON)
    call = ToolCall("python_code_with_standard_io", {"code": code, "input": stdin})
    assert parse_assistant_turn(dialogue.calls.format_call(call.tool, call.arguments), dialogue).calls == (call,)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ('{"name": "jupyter_code", "arguments": {"code": "1}', "JSONDecodeError: Unterminated string"),
        ("[]", "must be an object"),
        ('{"arguments": {}}', "must be an object"),
        ('{"name": "jupyter_code"}', "must be an object"),
        ('{"name": "rm", "arguments": {}}', 'unknown function "rm"; known: jupyter_code'),
        ('{"name": ["x"], "arguments": {}}', 'validation error: "name" must be a string'),
        ('{"name": "jupyter_code", "arguments": "print(1)"}', '"arguments" must be an object'),
        ('{"name": "jupyter_code", "arguments": {"code": 1}}', '"code" must be a string, not 1'),
        ('{"name": "jupyter_code", "arguments": {}}', '"code" must be given, as a string'),
        ('{"name": "jupyter_code", "arguments": {"code": "1", "input": ""}}', 'unknown parameter "input"'),
        ('{"name": "python_code_with_standard_io", "arguments": {"code": "1"}}', '"input" must be given'),
        ('{"name": "jupyter_code", "arguments": {"code": "\\ud800"}}', "half a surrogate pair"),
        ("[" * 5000, "nested too deeply"),
        ('{"name": "jupyter_code", "arguments": {"code": ' + "[" * 900 + "]" * 900 + "}}", "nested too deeply"),
        ('{"name": "\\udfff", "arguments": {}}', "unknown function"),
    ],
)
def test_the_result_of_a_malformed_call_names_the_problem(call: str, complaint: str) -> None:
    (read,) = parse_assistant_turn(f"<tool_call>\n{call}\n</tool_call>", FORMAT).calls
    assert isinstance(read, MalformedCall)
    assert complaint in read.error


TEXTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "jupyter_code", "arguments": {"code": "', '"}}', "\\ud800"]
    )
    | st.text(max_size=5)
).map("".join)


@given(TEXTS)
def test_any_parsed_model_output_fits_a_message(text: str) -> None:
    said = parse_assistant_turn(text, FORMAT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=AssistantTurn) == said


def test_without_tools_a_turn_has_no_calls() -> None:
    text = format_tool_call("jupyter_code", {"code": "1"}) + "\\boxed{2}"
    assert parse_assistant_turn(text, build_dialogue_format(DialogueConfig(tools=()), MATH_PYTHON)) == AssistantTurn(
        (), "2", 0, 0, 0, has_complete_answer=False
    )


def test_the_answer_is_read_from_the_configured_tags() -> None:
    dialogue = build_dialogue_format(DialogueConfig(answer_open="[A]", answer_close="[/A]"), MATH_PYTHON)
    text = "[A]\\boxed{1}[/A] [A]\\boxed{2}[/A] [A] \\boxed{3} <answer>\\boxed{4}</answer>"
    assert parse_assistant_turn(text, dialogue) == AssistantTurn(
        (), "2", answer_opens=3, answer_closes=2, answer_spans=2, has_complete_answer=True
    )


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>", ""])
def test_a_stop_token_is_no_part_of_the_turn(stop: str) -> None:
    dialogue = build_dialogue_format(DialogueConfig(stop_tokens=("<|im_end|>", "<|endoftext|>")), MATH_PYTHON)
    text = format_tool_call("jupyter_code", {"code": "1"}).removesuffix("\n</tool_call>")
    assert parse_assistant_turn(text + stop, dialogue).calls == (ToolCall("jupyter_code", {"code": "1"}),)


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        ("<tool_call>{}", 0),
        ("<tool_call>{}</tool_call><tool_call>", 1),
        ("</tool_call>{}<tool_call>", 0),
        ("<tool_call><tool_call>{}</tool_call></tool_call>", 1),
        ("<tool_call>{}<tool_call>{}</tool_call>", 1),
    ],
)
def test_an_unclosed_call_fails_or_is_ignored(text: str, num_calls: int) -> None:
    dialogue = build_dialogue_format(DialogueConfig(unclosed_call="ignore"), MATH_PYTHON)
    calls = parse_assistant_turn(text, dialogue).calls
    assert [isinstance(call, MalformedCall) and not call.is_decoded for call in calls] == [True] * num_calls
    is_unclosed = text in ("<tool_call>{}", "<tool_call>{}</tool_call><tool_call>", "</tool_call>{}<tool_call>")
    assert len(parse_assistant_turn(text, FORMAT).calls) == num_calls + is_unclosed


@pytest.mark.parametrize(
    ("text", "spans", "complete"),
    [
        ("<answer>\\boxed{1}</answer>", 1, True),
        ("<answer>\\boxed{1}</answer><answer>2</answer>", 2, False),
        ("\\boxed{1}<answer></answer>", 1, False),
        ("<answer>\\boxed{1}", 0, False),
        ("</answer>\\boxed{1}<answer>", 0, False),
        ("<answer>\\boxed{}</answer>", 1, False),
        ("<answer><answer>\\boxed{1}</answer></answer>", 1, True),
    ],
)
def test_an_answer_is_complete_in_a_closed_block_with_a_filled_box(text: str, spans: int, complete: bool) -> None:
    turn = parse_assistant_turn(text, FORMAT)
    assert (turn.answer_spans, turn.has_complete_answer) == (spans, complete)


def test_an_answer_without_a_box_is_complete_if_its_block_has_text() -> None:
    dialogue = build_dialogue_format(DialogueConfig(), TaskDescription("tools"))
    for text, complete in (("<answer> x </answer>", True), ("<answer> </answer>", False), ("x", False)):
        assert parse_assistant_turn(text, dialogue).has_complete_answer == complete


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so</reason><answer>\\boxed{42}</answer>", "42"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("\\boxed{1} <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1}</answer> no: <answer>\\boxed{2}</answer>", "2"),
        ("the answer is \\boxed{7}", "7"),
        ("<answer>42</answer>", None),
        ("\\boxed{unclosed", None),
        ("", None),
        ("<answer>first \\boxed{3}, so \\boxed{5</answer>", None),
        ("\\boxed{3} <answer>\\boxed{5</answer>", None),
        ("<answer>\\fbox {5}</answer>", "5"),
        ("<answer>\\boxed 5</answer>", "5"),
    ],
)
def test_the_answer_is_the_last_box_preferably_inside_the_answer_tags(text: str, answer: str | None) -> None:
    assert parse_assistant_turn(text, FORMAT).answer == answer


_LINES = Path(__file__).with_name("bug_reports.jsonl").read_text(encoding="utf-8").splitlines()
REPORTS = {report["id"]: report for report in map(json.loads, _LINES)}


@pytest.mark.parametrize("name", ["box-01", "box-04", "box-07"])
def test_boxes_of_public_reports_are_read_unless_the_last_box_is_cut(name: str) -> None:
    turn = parse_assistant_turn(REPORTS[name]["input"], FORMAT)
    answer = None if name == "box-07" else REPORTS[name]["expected"]
    assert (turn.answer, turn.has_complete_answer) == (answer, answer is not None)


def test_a_closing_tag_in_the_code_of_a_call_does_not_end_the_call() -> None:
    turn = parse_assistant_turn(REPORTS["call-01"]["input"], FORMAT)
    assert turn.calls == (ToolCall("jupyter_code", {"code": "print('</tool_call>')"}),)


TAGS = st.sampled_from(["</tool_call>", "<tool_call>", '"', "\\", "{", "}", "\n", "x", "<answer>"])
CODES = st.lists(TAGS, max_size=12).map("".join)


@given(st.lists(CODES, min_size=1, max_size=3), st.sampled_from(["", "\n", " "]))
def test_parsing_restores_calls_with_tags_in_their_code(codes: list[str], separator: str) -> None:
    text = separator.join(format_tool_call("jupyter_code", {"code": code}) for code in codes)
    expected = tuple(ToolCall("jupyter_code", {"code": code}) for code in codes)
    assert parse_assistant_turn(f"<reason>r</reason>{text}", FORMAT).calls == expected
    assert parse_assistant_turn(text.removesuffix("</tool_call>"), FORMAT).calls == expected


UNITS = ("", '\\"' * 9, '{"', "{", '{"a": "', "[[", '"', "{}", '{""', '{"}', "[1,", '{"\\"')


@pytest.mark.parametrize(
    "opening", ["\\boxed{", "<answer>", "<answer>\\boxed{", *(f"<tool_call>{unit}" for unit in UNITS)]
)
@pytest.mark.slow
def test_repeated_openings_are_parsed_in_linear_time(opening: str) -> None:
    """Quadratic time would need minutes: each opening would be compared with all later text."""
    turn = parse_assistant_turn(opening * 20_000, FORMAT)
    assert (turn.answer, len(turn.calls)) == (None, opening.startswith("<tool_call>"))
