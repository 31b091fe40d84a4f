"""Tests: a row with its own system text and tools has the prompt, calls and loss of a task with these tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.data_files import BadRows, DatasetError, DatasetRow
from asterism.engine.data.row_prompts import parse_tools
from asterism.engine.data.sft_dialogues import describe_bad_rows
from asterism.policies.dialogue.chat_format import (
    DialogueFormat,
    TextSegment,
    build_dialogue_format,
    build_prompt_segments,
    build_tool_turn_segments,
)
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema
from asterism.tasks.math_python import MATH_PYTHON
from tests.engine.data.cold_start_rows import FORMAT, encode, read_rows
from tests.engine.data.public_layouts import (
    ANSWER,
    ARGUMENTS,
    CALL_TEXT,
    CLOCK,
    PUBLIC_ROWS,
    QUESTION,
    REMARK,
    RESULT,
    SEVERAL_CALLS_ROWS,
    SYSTEM,
    THOUGHT,
    TIME,
    TOOL,
    WEATHER,
)

SCHEMAS = tuple(ToolSchema(**each) for each in (WEATHER, CLOCK))
WEATHER_CALL = format_tool_call("get_weather", ARGUMENTS)
CODE_CALL = {"name": "python", "arguments": {"code": "print(1)"}}


def build_task_format(*tools: ToolSchema, system: str = SYSTEM) -> DialogueFormat:
    """Build the format of a task with this system text and these tools."""
    return build_dialogue_format(DialogueConfig(tools=()), TaskDescription("tools", tools, system=system))


def render_prompt(question: str, dialogue: DialogueFormat) -> str:
    return "".join(segment.text for segment in build_prompt_segments(question, dialogue))


def map_names(**names: str) -> SftFileConfig:
    """Configure a file: each keyword is a function in its rows, and the value is the run's tool for that function."""
    return SftFileConfig(name="some", data="", tool_names=names)


def chat(*turns: str, system: str = "") -> list[dict[str, Any]]:
    """Build messages that alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]
    return [{"role": "system", "content": system}, *messages] if system else messages


@pytest.mark.parametrize(
    ("rows", "turn", "results"),
    [
        (PUBLIC_ROWS, f"</reason>\n{WEATHER_CALL}", [RESULT]),
        (
            SEVERAL_CALLS_ROWS,
            f"{THOUGHT}</reason>\n{REMARK}\n{WEATHER_CALL}\n{format_tool_call('get_time', {})}",
            [RESULT, TIME],
        ),
    ],
    ids=["one call", "several calls"],
)
def test_five_public_layouts_have_the_token_ids_of_a_task_with_their_tools(
    tmp_path: Path, rows: dict[str, Any], turn: str, results: list[str]
) -> None:
    bad_rows = BadRows(5)
    found = read_rows(tmp_path / "some.jsonl", *rows.values(), bad_rows=bad_rows)
    assert bad_rows.errors == []
    task = build_task_format(*SCHEMAS)
    parts = [
        (0, build_prompt_segments(QUESTION, task)),
        (1, [TextSegment(f"{turn}<|im_end|>", True)]),
        (0, build_tool_turn_segments(results, task)),
        (1, [TextSegment(f"</reason>\n{ANSWER}<|im_end|>", True)]),
    ]
    encoded = [(in_loss, encode(*segments)) for in_loss, segments in parts]
    token_ids = [token for _, ids in encoded for token in ids]
    loss_mask = [in_loss for in_loss, ids in encoded for _ in ids]
    same_ids = {name: row.dialogue.token_ids == token_ids for name, row in zip(rows, found, strict=True)}
    assert same_ids == dict.fromkeys(rows, True)
    assert all(row.dialogue.loss_mask == loss_mask for row in found)


@pytest.mark.parametrize("prompt", ["row", "run"])
def test_a_chat_keeps_its_system_text_unless_the_file_sets_the_runs_prompt(tmp_path: Path, prompt: Any) -> None:
    file = SftFileConfig(name="chat", data="", prompt=prompt)
    (row,) = read_rows(tmp_path / "some.jsonl", {"messages": chat("Hi!", "Arr!", system="A pirate.")}, file=file)
    start = "<|im_start|>system\nA pirate.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
    assert row.text.startswith(start) == (prompt == "row")
    assert (FORMAT.system in row.text) == (FORMAT.instruction in row.text) == (prompt == "run")


def test_a_row_without_a_prompt_uses_the_prompt_of_the_run(tmp_path: Path) -> None:
    rows = [{"messages": chat("1?", "1"), **absent} for absent in ({}, {"tools": []}, {"tools": "", "system": None})]
    first, *others = read_rows(tmp_path / "some.jsonl", *rows)
    assert {(row.text, row.generated) for row in others} == {(first.text, first.generated)}
    assert first.text.startswith(render_prompt("1?", FORMAT))


def test_a_row_with_the_system_text_of_the_run_keeps_its_own_tools(tmp_path: Path) -> None:
    bare = build_dialogue_format(DialogueConfig(tools=(), system=SYSTEM), MATH_PYTHON)
    for row in read_rows(tmp_path / "some.jsonl", *PUBLIC_ROWS.values(), formats=bare):
        assert row.text.startswith(render_prompt(QUESTION, build_task_format(*SCHEMAS)))


def test_only_a_null_that_parquet_adds_is_dropped_from_a_schema(tmp_path: Path) -> None:
    properties = {"unit": {"type": "string", "default": None}}
    tools = [{"name": "search", "parameters": {"type": "object", "properties": properties}}]
    (kept,) = parse_tools(DatasetRow(tmp_path / "some.jsonl", 1, {"tools": tools}))
    (text,) = parse_tools(DatasetRow(tmp_path / "some.parquet", 1, {"tools": json.dumps(tools)}))
    assert kept.parameters["properties"] == text.parameters["properties"] == properties
    (filled,) = parse_tools(DatasetRow(tmp_path / "some.parquet", 1, {"tools": tools}))
    assert filled.parameters["properties"] == {"unit": {"type": "string"}}


def test_the_default_system_text_precedes_tools_without_a_system_text(tmp_path: Path) -> None:
    (row,) = read_rows(tmp_path / "some.jsonl", {"tools": [TOOL], "messages": chat(QUESTION, ANSWER)})
    task = build_task_format(SCHEMAS[0], system="You are a helpful assistant.")
    assert row.text.startswith(render_prompt(QUESTION, task))


def test_a_row_keeps_its_tools_in_a_run_without_a_system_text(tmp_path: Path) -> None:
    bare = build_dialogue_format(DialogueConfig(tools=(), system=""), MATH_PYTHON)
    (row,) = read_rows(tmp_path / "some.jsonl", {"tools": [TOOL], "messages": chat(QUESTION, ANSWER)}, formats=bare)
    assert TOOL["function"]["name"] in row.text


def test_a_system_text_that_already_describes_the_tools_stays_unchanged(tmp_path: Path) -> None:
    system = f"Call functions.\n<tools>\n{json.dumps([TOOL])}\n</tools>"
    messages = chat(QUESTION, f"<tool_call>\n{CALL_TEXT}\n</tool_call>", system=system)
    rows = [{"messages": messages}, {"messages": messages, "tools": [TOOL]}]
    rows.append({"messages": [*messages[:2], {"role": "assistant", "tool_calls": [json.loads(CALL_TEXT)]}]})
    first, *others = read_rows(tmp_path / "some.jsonl", *rows)
    assert {(row.text, row.generated) for row in others} == {(first.text, first.generated)}
    assert first.text.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{QUESTION}")


def test_a_result_can_be_an_object(tmp_path: Path) -> None:
    messages = chat("1?", "<tool_call>{</tool_call>")
    last = {"role": "assistant", "content": "4"}
    rows = [{"messages": [*messages, {"role": "tool", "content": each}, last]} for each in ({"degrees": 4}, RESULT)]
    one, other = read_rows(tmp_path / "some.jsonl", *rows)
    assert (one.text, one.generated) == (other.text, other.generated)


# ---------------------------------------------------------------- names of functions


@pytest.mark.parametrize("in_text", [False, True])
def test_a_mapped_function_becomes_the_tool_of_the_run(tmp_path: Path, *, in_text: bool) -> None:
    call = (
        {"content": f"<tool_call>\n{json.dumps(CODE_CALL)}\n</tool_call>"} if in_text else {"tool_calls": [CODE_CALL]}
    )
    messages = [*chat("1?"), {"role": "assistant", **call}]
    (row,) = read_rows(tmp_path / "some.jsonl", {"messages": messages}, file=map_names(python="jupyter_code"))
    assert row.generated == f"</reason>\n{format_tool_call('jupyter_code', CODE_CALL['arguments'])}<|im_end|>"


def test_a_row_with_a_system_text_and_calls_uses_the_tools_of_the_run(tmp_path: Path) -> None:
    messages = [*chat("1?", system=SYSTEM), {"role": "assistant", "tool_calls": [CODE_CALL]}]
    (row,) = read_rows(tmp_path / "some.jsonl", {"messages": messages}, file=map_names(python="jupyter_code"))
    assert row.text.startswith(render_prompt("1?", build_task_format(*FORMAT.tools)))


def test_unknown_functions_are_counted_and_listed_within_the_limit_of_bad_rows(tmp_path: Path) -> None:
    calls = [CODE_CALL, {**CODE_CALL, "name": "search"}, CODE_CALL]
    rows = [{"messages": [*chat("1?"), {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    path, bad_rows = tmp_path / "some.jsonl", BadRows(3)
    assert len(read_rows(path, *rows, {"messages": chat("1?", "1")}, bad_rows=bad_rows)) == 1
    described = describe_bad_rows(bad_rows.errors)
    assert described.startswith(
        f"3 unusable rows are skipped, the first: {path}: row 1, field `messages[1].tool_calls[0]"
    )
    assert "unknown functions by number of rows: python (2), search (1)" in described
    with pytest.raises(Exception, match=r"more unusable rows than sft\.max_bad_rows = 2;"):
        read_rows(path, *rows, bad_rows=BadRows(2, "sft.max_bad_rows"))


def test_the_error_for_a_file_without_a_usable_dialogue_shows_the_first_problem(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"no usable dialogue: 1 unusable rows are skipped, the first: .* row 1"):
        read_rows(tmp_path / "some.jsonl", {"messages": []}, bad_rows=BadRows(9))


def test_arguments_of_a_renamed_call_must_fit_the_tool(tmp_path: Path) -> None:
    messages = [*chat("1?"), {"role": "assistant", "tool_calls": [{"name": "python", "arguments": {"source": "1"}}]}]
    with pytest.raises(DatasetError, match=r"tool_calls\[0\]\.arguments`: do not fit jupyter_code: "):
        read_rows(tmp_path / "some.jsonl", {"messages": messages}, file=map_names(python="jupyter_code"))


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("{", "`tools`: not JSON: "),
        (7, "`tools`: expected a list of tools"),
        ([TOOL, "search"], "`tools[1]`: not JSON: "),
        ([{"type": "function", "function": {"description": "?"}}], "`tools[0]`: expected a function with `name`"),
    ],
)
def test_an_unusable_tool_is_reported(tools: Any, problem: str) -> None:
    with pytest.raises(DatasetError) as caught:
        parse_tools(DatasetRow(Path("some.jsonl"), 3, {"tools": tools}))
    assert str(caught.value).startswith(f"some.jsonl: row 3, field {problem}")


def test_a_tool_can_be_json_text_without_parameters() -> None:
    row = DatasetRow(Path("some.jsonl"), 1, {"tools": [json.dumps(TOOL), {"name": "stop"}]})
    assert parse_tools(row) == (SCHEMAS[0], ToolSchema("stop", "", {"type": "object", "properties": {}}))
