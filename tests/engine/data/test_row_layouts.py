"""Tests: the keys of configs/rstar2_cold_start.toml are sufficient to read its six public data sets."""

import json
from pathlib import Path
from typing import Any

import polars
import pytest

from asterism.configs.load import load_run
from asterism.configs.schema.algorithm import SftFileConfig
from asterism.engine.data.data_files import BadRows, DatasetError
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.policies.tools.tool_schema import ToolSchema
from tests.engine.data.cold_start_rows import FORMAT, read_file, read_rows
from tests.engine.data.public_layouts import (
    ANSWER,
    ARGUMENTS,
    CLOCK,
    PUBLIC_ROWS,
    QUESTION,
    RESULT,
    SYSTEM,
    WEATHER,
    say,
)
from tests.engine.data.test_row_prompts import build_task_format

FILES = {each.name: each for each in load_run(Path("configs/rstar2_cold_start.toml")).sft.mixture}
PROGRAM = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))"
FUNCTIONS = json.dumps([WEATHER | {"name": "Get Weather", "required": None}, CLOCK])
INTRODUCTION = "You choose functions. The time is 12:24:35."
TOOLACE = {
    "system": f"{INTRODUCTION}Here is a list of functions in JSON format that you can invoke:\n{FUNCTIONS}. \n"
    "Put a call in the format of [func1(params_name=params_value), func2(params)]\n\nNO other text MUST be included.",
    "conversations": [
        {"from": "user", "value": QUESTION},
        {"from": "assistant", "value": "[Get Weather(city=\"Zürich\", unit='celsius'), get_time()]"},
        {"from": "tool", "value": f"[{RESULT}, {RESULT}]"},
        {"from": "assistant", "value": ANSWER},
    ],
}
APIGEN_MT = {
    "system": SYSTEM,
    "tools": json.dumps([WEATHER, CLOCK]),
    "conversations": [
        {"from": "human", "value": QUESTION},
        {"from": "function_call", "value": json.dumps({"name": "get_weather", "arguments": json.dumps(ARGUMENTS)})},
        {"from": "observation", "value": RESULT},
        {"from": "gpt", "value": ANSWER},
        {"from": "human", "value": "And tomorrow?"},
        {"from": "gpt", "value": "I do not know."},
    ],
}
MAGICODER = {"instruction": "Add 1 and 2.", "response": f"Here it is:\n\n```python\n{PROGRAM}\n```\n\nIt prints 3."}
NEMOTRON = {
    "input": [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye!"}],
    "output": "Goodbye!",
    **{"category": "chat", "reasoning": "off", "system_prompt": "detailed thinking off", "used_in_training": "yes"},
}  # fmt: skip
TULU = {
    "id": "personas_IF_1",
    "prompt": "Two words, please.",
    "messages": [{"role": "user", "content": "Two words, please."}, {"role": "assistant", "content": "Of course."}],
    "constraints": ["length constraints:number of words"],
}


def close_turns(*turns: str) -> str:
    """Return the text that has a loss, for turns without reasoning."""
    return "".join(f"</reason>\n{turn}<|im_end|>" for turn in turns)


def render_system(text: str, *tools: ToolSchema) -> str:
    return f"<|im_start|>system\n{build_task_format(*tools, system=text).system}<|im_end|>\n<|im_start|>user\n"


WEATHER_CALL = format_tool_call("get_weather", ARGUMENTS)
TOOLS = (ToolSchema(**WEATHER), ToolSchema(**CLOCK))
RUN_PROMPT = f"<|im_start|>system\n{FORMAT.system}<|im_end|>\n<|im_start|>user\n{FORMAT.instruction}"


@pytest.mark.parametrize(
    ("name", "row", "prompt", "generated"),
    [
        (
            "toolace",
            TOOLACE,
            render_system(INTRODUCTION, TOOLS[0]._replace(name="Get Weather"), TOOLS[1]),
            close_turns(f"{format_tool_call('Get Weather', ARGUMENTS)}\n{format_tool_call('get_time', {})}", ANSWER),
        ),
        ("apigen_mt", APIGEN_MT, render_system(SYSTEM, *TOOLS), close_turns(WEATHER_CALL, ANSWER, "I do not know.")),
        (
            "glaive",
            APIGEN_MT | {"system": None, "conversations": APIGEN_MT["conversations"][:4]},
            render_system("You are a helpful assistant.", *TOOLS),
            close_turns(WEATHER_CALL, ANSWER),
        ),
        ("code", MAGICODER, RUN_PROMPT, close_turns(format_tool_call("jupyter_code", {"code": PROGRAM}))),
        ("instructions", TULU, RUN_PROMPT, close_turns("Of course.")),
        (
            "chat",
            NEMOTRON,
            "<|im_start|>system\ndetailed thinking off<|im_end|>\n<|im_start|>user\n",
            close_turns("Hello!", "Goodbye!"),
        ),
    ],
)
def test_a_public_data_set_is_read_as_published(
    tmp_path: Path, name: str, row: dict[str, Any], prompt: str, generated: str
) -> None:
    (found,) = read_rows(tmp_path / "some.jsonl", row, file=FILES[name])
    assert found.text.startswith(prompt)
    assert found.generated == generated


CALL = {"function": {"name": "jupyter_code", "arguments": '{"code": "print(1)"}'}}
CALLED = [say("user", "1?"), say("assistant", "", tool_calls=[CALL]), say("tool", "1"), say("assistant", "1")]
PLAIN = [say("user", "1?"), say("assistant", "1")]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"messages": CALLED}], {}),
        ([PUBLIC_ROWS["reasoning_content"], {"tools": None, "messages": PLAIN}], {}),
        ([{"messages": PLAIN, "task": "archive"}], {"formats": {"math": FORMAT, "archive": build_task_format()}}),
        *(
            ([row], {"file": FILES[name]})
            for name, row in (("toolace", TOOLACE), ("code", MAGICODER), ("chat", NEMOTRON))
        ),
    ],
    ids=["calls", "tools", "tasks", "toolace", "code", "chat"],
)
def test_rows_are_equal_in_parquet_and_jsonl(tmp_path: Path, rows: list[Any], options: dict[str, Any]) -> None:
    expected = read_rows(tmp_path / "some.jsonl", *rows, **options)
    polars.DataFrame(rows, strict=False, infer_schema_length=None).write_parquet(tmp_path / "some.parquet")
    found = read_file(tmp_path / "some.parquet", **options)
    assert [row.dialogue._replace(name="") for row in found] == [row.dialogue._replace(name="") for row in expected]


def replace_turn(position: int, value: str) -> dict[str, Any]:
    turns = list(TOOLACE["conversations"])
    turns[position] = {**turns[position], "value": value}
    return {**TOOLACE, "conversations": turns}


# ---------------------------------------------------------------- calls = "python"


@pytest.mark.parametrize("text", ["[see the manual (page 3)]", "I call [get_time()].", "[1, 2]"])
def test_prose_in_brackets_stays_text(tmp_path: Path, text: str) -> None:
    (found,) = read_rows(tmp_path / "some.jsonl", replace_turn(3, text), file=FILES["toolace"])
    assert found.generated.endswith(close_turns(text))


def test_a_list_of_calls_stays_text_unless_the_file_has_the_key(tmp_path: Path) -> None:
    text = TOOLACE["conversations"][1]["value"]
    row = {"conversations": [{"from": "user", "value": "1?"}, {"from": "assistant", "value": text}]}
    (found,) = read_rows(tmp_path / "some.jsonl", row)
    assert found.generated == close_turns(text)


def test_the_description_of_a_call_syntax_is_removed_from_the_system_text(tmp_path: Path) -> None:
    syntax = "You MUST put a call in the format of [func_name1(params_name1=value...), func_name2(params)]"
    system = f"{INTRODUCTION}\n{syntax}\nHere is a list of functions in JSON format that you can invoke.\n{FUNCTIONS}"
    rows = [{**TOOLACE, "system": system}, TOOLACE]
    first, second = read_rows(tmp_path / "some.jsonl", *rows, file=FILES["toolace"])
    assert (first.text, first.generated) == (second.text, second.generated)


@pytest.mark.parametrize(
    "functions", ["[{'name': 'get_time'}]", '[{"name": "get_time"', '[{"tool_name": "get_time"}]', ""]
)
def test_a_function_is_unknown_without_a_json_list_of_functions(tmp_path: Path, functions: str) -> None:
    row = replace_turn(1, "[get_time()]") | {"system": f"Here is a list of functions: {functions}"}
    with pytest.raises(DatasetError, match=r"tool_calls\[0\]\.name`: unknown function 'get_time'; known: jupyter_code"):
        read_rows(tmp_path / "some.jsonl", row, file=FILES["toolace"])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("[Get Weather(city=Zürich)]", "not a literal of JSON or Python: Zürich"),
        ('[Get Weather(city="Zürich"]', "a bracket is missing"),
        ('[Get Weather("Zürich")]', 'expected one argument=value of each name: "Zürich"'),
        ('[Get Weather]=>(city="Zürich")', "a list begins with [ and ends with ]"),
    ],
)
def test_a_malformed_call_of_a_known_function_is_reported(tmp_path: Path, call: str, problem: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read_rows(tmp_path / "some.jsonl", TOOLACE, replace_turn(1, call), file=FILES["toolace"])
    assert f": row 2, field `conversations[1].content`: not a list of calls: {problem}" in str(caught.value)


# ---------------------------------------------------------------- program_tool and where


@pytest.mark.parametrize(
    "response",
    [
        "Sorting is a matter of taste.",
        "```java\nint a = 1;\n```",
        "```python\nprint(1)\n```\nor\n```python\nprint(2)\n```",
        "```python\nprint(1)",
        None,
    ],
)
def test_a_response_without_exactly_one_python_program_is_skipped(tmp_path: Path, response: str | None) -> None:
    bad_rows, other = BadRows(9), {"instruction": "?", "response": response}
    assert len(read_rows(tmp_path / "some.jsonl", other, MAGICODER, file=FILES["code"], bad_rows=bad_rows)) == 1
    assert bad_rows.errors == []


def test_rows_with_another_value_in_the_column_are_skipped(tmp_path: Path) -> None:
    on = {**NEMOTRON, "reasoning": "on", "output": "<think>\nHm.\n</think>\n\nGoodbye!"}
    unknown, bad_rows = {**NEMOTRON, "reasoning": None}, BadRows(9)
    (row,) = read_rows(tmp_path / "some.jsonl", on, unknown, NEMOTRON, file=FILES["chat"], bad_rows=bad_rows)
    assert "Hm." not in row.text
    assert bad_rows.errors == []
    with pytest.raises(DatasetError, match=r"no usable dialogue: each row is left out by `where` or `program_tool`"):
        read_rows(tmp_path / "some.jsonl", on, file=FILES["chat"])


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("code", {"response": MAGICODER["response"]}, "`instruction`: expected a string"),
        ("chat", {**NEMOTRON, "input": "Hi!"}, "`input`: expected a list of messages"),
        ("chat", {**NEMOTRON, "output": 7}, "`output`: expected a string"),
        ("chat", {**NEMOTRON, "output": None}, "`messages`: expected a list of messages"),
        ("glaive", APIGEN_MT | {"tools": "{"}, "`tools`: not JSON: "),
    ],
)
def test_an_unusable_field_is_reported(tmp_path: Path, name: str, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read_rows(tmp_path / "some.jsonl", row, file=FILES[name])
    assert f": row 1, field {problem}" in str(caught.value)


def test_a_program_is_refused_if_the_row_lacks_the_tool(tmp_path: Path) -> None:
    file = SftFileConfig(name="some", data="", program_tool="jupyter_code")
    row = {**MAGICODER, "tools": [CLOCK]}
    with pytest.raises(DatasetError, match=r"unknown function 'jupyter_code'; known: get_time"):
        read_rows(tmp_path / "some.jsonl", row, file=file)
