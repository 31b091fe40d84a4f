"""Tests of scripted turns: values from a schema, wrong arguments, files of turns, and signatures."""

from pathlib import Path
from typing import Any

import pytest

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.json_calls import JSON_CALLS
from asterism.policies.dialogue.parse_turn import MalformedCall, ToolCall, parse_assistant_turn
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_arguments import ArgumentError, check_arguments
from asterism.policies.tools.tool_schema import ToolSchema
from asterism.tasks.checking.turn_scripts import (
    fill_columns,
    format_signature,
    generate_arguments,
    generate_script,
    generate_value,
    generate_wrong_arguments,
    read_turn_script,
)

SEARCH = ToolSchema(
    "search",
    "Search.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "order": {"type": "string", "enum": ["new", "old"]},
            "filters": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "limit": {"type": "number", "nullable": True},
        },
        "required": ["query", "sizes"],
    },
)
STOP = ToolSchema("stop", "Stop.", {"type": "object", "properties": {}})
FORMAT = build_dialogue_format(DialogueConfig(tools=()), TaskDescription("environment", (SEARCH, STOP)))
PROBLEM = DatasetProblem("rows.jsonl:1", "How many?", "42", {"size": 3})


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        *(({"type": "string"}, "text"), ({"type": "integer"}, 1), ({"type": "integer", "minimum": 5}, 5)),
        *(({"type": "number"}, 1.0), ({"type": "boolean"}, True), ({"type": "null"}, None), ({}, "text")),
        ({"type": ["integer", "string"]}, 1),
        ({"type": "string", "enum": ["b", "a"]}, "b"),
        ({"type": "string", "default": "d"}, "d"),
        ({"anyOf": [{"type": "integer"}, {"type": "array"}]}, 1),
        ({"type": "array", "items": {"type": "boolean"}}, [True]),
        ({"type": "object", "properties": {"x": {"type": "integer"}}}, {"x": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"key": 1}),
        ({"type": "object"}, {}),
    ],
)
def test_a_generated_value_has_the_first_type_or_choice_of_its_schema(schema: dict[str, Any], value: object) -> None:
    generated = generate_value(schema)
    assert (generated, type(generated)) == (value, type(value))


def test_generated_arguments_fit_the_schema_and_wrong_arguments_do_not() -> None:
    arguments = generate_arguments(SEARCH.parameters)
    assert arguments == {"query": "text", "sizes": [1], "order": "new", "filters": {"key": True}, "limit": 1.0}
    assert check_arguments(arguments, SEARCH.parameters) == arguments
    with pytest.raises(ArgumentError, match='"query" must be a string'):
        check_arguments(generate_wrong_arguments(SEARCH.parameters), SEARCH.parameters)
    with pytest.raises(ArgumentError, match='unknown parameter "unknown_parameter"'):
        check_arguments(generate_wrong_arguments(STOP.parameters), STOP.parameters)


def test_a_script_has_one_wrong_call_one_call_of_each_tool_and_an_answer() -> None:
    script = generate_script("environment", FORMAT, PROBLEM, 1)
    parsed = [parse_assistant_turn(turn, FORMAT) for turn in script.turns]
    assert [type(call) for turn in parsed for call in turn.calls] == [MalformedCall, ToolCall, ToolCall]
    assert [call.tool for turn in parsed for call in turn.calls if isinstance(call, ToolCall)] == ["stop", "search"]
    assert (parsed[-1].answer, script.has_truth) == ("no answer", False)


def test_plays_with_an_even_number_start_with_another_tool_and_end_with_the_truth() -> None:
    script = generate_script("environment", FORMAT, PROBLEM, 2)
    parsed = [parse_assistant_turn(turn, FORMAT) for turn in script.turns]
    assert [call.tool for turn in parsed for call in turn.calls if isinstance(call, ToolCall)] == ["search", "stop"]
    assert (parsed[-1].answer, script.has_truth) == ("42", True)


def test_a_turn_closes_the_reasoning_that_the_prefill_opens() -> None:
    assert generate_script("dialogue", FORMAT, PROBLEM, 0).turns[0] == "</reason>\nMy answer is 1"
    bare = build_dialogue_format(DialogueConfig(tools=(), prefill=""), TaskDescription("dialogue"))
    assert generate_script("dialogue", bare, PROBLEM, 0).turns == (
        "My answer is 1",
        "My answer is 2",
        "My answer is 42",
    )


def test_turns_of_a_text_file_are_separated_by_lines_of_dashes(tmp_path: Path) -> None:
    file = tmp_path / "turns.txt"
    file.write_text("one\ntwo\n---\n\nthree {size}\n---\n")
    script = read_turn_script(file, JSON_CALLS)
    assert script.turns == ("one\ntwo", "three {size}")
    assert fill_columns(script, PROBLEM).turns == ("one\ntwo", "three 3")


def test_a_line_of_json_is_a_text_a_message_or_a_call(tmp_path: Path) -> None:
    file = tmp_path / "turns.jsonl"
    file.write_text('"{ground_truth}"\n\n{"role": "assistant", "content": "b"}\n{"name": "stop", "arguments": {}}\n')
    script = fill_columns(read_turn_script(file, JSON_CALLS), PROBLEM)
    assert script.turns == ("42", "b", '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(
    "line", ["{}", "1", '{"content": 1}', '{"name": "stop"}', "text", '{"name": "a", "arguments": 1}']
)
def test_a_line_without_a_turn_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "turns.jsonl"
    file.write_text(f'"a"\n{line}\n')
    with pytest.raises(UnusableInput, match=r"--turns .*/turns\.jsonl: line 2: no turn; expected"):
        read_turn_script(file, JSON_CALLS)


def test_a_missing_or_empty_file_of_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"cannot be read"):
        read_turn_script(tmp_path / "turns.txt", JSON_CALLS)
    (tmp_path / "empty.txt").write_text("---\n")
    with pytest.raises(UnusableInput, match=r"has no turns"):
        read_turn_script(tmp_path / "empty.txt", JSON_CALLS)


def test_a_script_with_bare_answers_uses_no_answer_tags() -> None:
    assert generate_script("tools", FORMAT, PROBLEM, 2, is_bare=True).turns[-1] == "42"


def test_a_signature_has_types_choices_and_optional_parameters() -> None:
    assert format_signature(SEARCH) == (
        'search(query: string, sizes: list[integer], order?: "new" | "old", filters?: object, limit?: number | null)'
    )
    assert format_signature(STOP) == "stop()"
