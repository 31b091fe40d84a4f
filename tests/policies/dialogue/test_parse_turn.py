"""Tool calls and answers, parsed from assistant turns."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.dialogue_options import DialogueConfig
from policies.dialogue.chat_format import build_dialogue_format, format_tool_call
from policies.dialogue.parse_turn import (
    AssistantTurn,
    MalformedCall,
    ToolCall,
    extract_last_boxed,
    parse_assistant_turn,
)
from policies.tools.task_description import TaskDescription
from tasks.math_python import MATH_PYTHON

FORMAT = build_dialogue_format(DialogueConfig(), MATH_PYTHON)


@given(st.text(), st.text())
def test_formatted_calls_parse_back(code: str, stdin: str) -> None:
    text = format_tool_call("python_code_with_standard_io", {"code": code, "input": stdin})
    if "</tool_call>" in code + stdin:
        return
    assert parse_assistant_turn(text, FORMAT).calls == (
        ToolCall("python_code_with_standard_io", {"code": code, "input": stdin}),
    )


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
def test_any_model_output_fits_a_message(text: str) -> None:
    said = parse_assistant_turn(text, FORMAT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=AssistantTurn) == said


def test_brackets_in_a_string_are_no_nesting() -> None:
    code = "[" * 1000 + '\\" {' * 100
    (call,) = parse_assistant_turn(format_tool_call("jupyter_code", {"code": code}), FORMAT).calls
    assert call == ToolCall("jupyter_code", {"code": code})


def test_without_tools_a_turn_has_no_calls() -> None:
    text = format_tool_call("jupyter_code", {"code": "1"}) + "\\boxed{2}"
    assert parse_assistant_turn(text, build_dialogue_format(DialogueConfig(tools=()), MATH_PYTHON)) == AssistantTurn(
        (), "2", 0, 0, 0, has_complete_answer=False
    )


def test_the_answer_tags_of_the_configuration_count() -> None:
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


def test_a_call_that_is_never_closed_is_still_a_call() -> None:
    (read,) = parse_assistant_turn('<tool_call>\n{"name": "jupyter_code", "argu', FORMAT).calls
    assert isinstance(read, MalformedCall)


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
def test_an_ignored_unclosed_call_is_no_call(text: str, num_calls: int) -> None:
    dialogue = build_dialogue_format(DialogueConfig(unclosed_call="ignore"), MATH_PYTHON)
    calls = parse_assistant_turn(text, dialogue).calls
    assert [isinstance(call, MalformedCall) and not call.is_decoded for call in calls] == [True] * num_calls


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
    ],
)
def test_the_answer_is_the_last_box_preferably_inside_the_answer_tags(text: str, answer: str | None) -> None:
    assert parse_assistant_turn(text, FORMAT).answer == answer


@given(st.text(alphabet="{}ab\\", max_size=30))
def test_an_unbalanced_box_is_ignored(content: str) -> None:
    found = extract_last_boxed("\\boxed{" + content)
    if found is not None:
        assert found.count("{") == found.count("}")


def _find_last_boxed_by_definition(text: str) -> str | None:
    """Tries each opening from the last one to the first, in quadratic time."""
    for opening in reversed(list(re.finditer(r"\\boxed\{", text))):
        depth = 1
        for position in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opening.end() : position]
    return None


PIECES = st.sampled_from(["\\boxed{", "{", "}", "}", "\\", "x", "<answer>", "</answer>", "boxed{"])


@pytest.mark.slow
@given(st.lists(PIECES, max_size=30).map("".join))
def test_the_last_answer_agrees_with_its_definition(text: str) -> None:
    assert extract_last_boxed(text) == _find_last_boxed_by_definition(text)
    sections = re.findall(r"<answer>(.*?)</answer>", text)
    in_section = _find_last_boxed_by_definition(sections[-1]) if sections else None
    expected = _find_last_boxed_by_definition(text) if in_section is None else in_section
    assert parse_assistant_turn(text, FORMAT).answer == expected


def test_repeated_openings_are_parsed_in_linear_time() -> None:
    """Quadratic time would need minutes: each opening would be compared with all later text."""
    for opening in ("\\boxed{", "<answer>", "<answer>\\boxed{", "<tool_call>", "<tool_call>" + '\\"' * 9):
        assert parse_assistant_turn(opening * 4_000, FORMAT).answer is None
