"""Tests, for each layout and kind of prompt: a cold-start row and the request with its messages have equal token ids.

The messages of the requests are in the layout of OpenAI, written by hand. They share only the tools with the public rows.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.tasks import MATH_PYTHON
from tests.engine.data.public_layouts import PUBLIC_ROWS, SEVERAL_CALLS_ROWS, TOOLS
from tests.engine.export.exported_chats import DIALOGUES, assert_same_ids, export_chat, render, tokenize_rows
from tests.engine.export.family_folders import FAMILIES, FAMILY_KINDS

FORMATS = ("default", "think", "plain")  # public answers do not start with the prefill of "no system"
BARE = DialogueConfig(tools=(), system="Be brief.", instruction="Solve it: ")
WEATHER_CALL = {
    "id": "call_a",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Z\u00fcrich", "unit": "celsius"}},
}
TIME_CALL = {"id": "call_b", "type": "function", "function": {"name": "get_time", "arguments": {}}}
START = [
    {"role": "system", "content": "You are a weather service."},
    {"role": "user", "content": "Is it cold in Z\u00fcrich?"},
]
ANSWER = {"role": "assistant", "content": "Yes, it has 4 \u00b0C."}
WEATHER_RESULT = {"role": "tool", "tool_call_id": "call_a", "content": '{"degrees": 4}'}
TIME_RESULT = {"role": "tool", "tool_call_id": "call_b", "content": "12:30 \u2603"}
ONE_CALL = [*START, {"role": "assistant", "content": None, "tool_calls": [WEATHER_CALL]}, WEATHER_RESULT, ANSWER]
TWO_CALLS = [
    *START,
    {
        "role": "assistant",
        "reasoning_content": "I need both.\n",
        "content": "One moment.",
        "tool_calls": [WEATHER_CALL, TIME_CALL],
    },
    WEATHER_RESULT,
    TIME_RESULT,
    ANSWER,
]


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_public_rows_have_the_ids_of_the_request_with_their_messages(tmp_path: Path, family: str, config: str) -> None:
    kind, options = FAMILY_KINDS[family], DIALOGUES[config]
    exported = export_chat(tmp_path / "exported", kind, options)
    for rows, messages in ((PUBLIC_ROWS, ONE_CALL), (SEVERAL_CALLS_ROWS, TWO_CALLS)):
        learned = tokenize_rows(tmp_path, kind, options, [*rows.values()])
        assert len(learned) == 5
        for each in learned:
            assert_same_ids(exported, messages, TOOLS, each)


def list_prompts(system: str, schemas: list[Any]) -> dict[str, dict[str, Any]]:
    """List rows with each combination of system text and tools in docs/data.md. The arguments are those of the run."""
    call = {"name": "jupyter_code", "arguments": {"code": "print(6 * 7)"}}
    called = [START[1], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "42"}, ANSWER]
    trained = {"role": "system", "content": system}
    described = {"role": "system", "content": f"Call these.\n<tools>\n{json.dumps(TOOLS)}\n</tools>"}
    return {
        "prompt of the run": {"messages": [START[1], ANSWER]},
        "tools of the run": {"messages": called, "tools": schemas},
        "system text of the run": {"messages": [trained, *called]},
        "system text and tools of the run": {"messages": [trained, *called], "tools": schemas},
        "system text of the run, other tools": {"messages": [trained, *ONE_CALL[1:]], "tools": TOOLS},
        "system text": {"messages": [START[0], START[1], ANSWER]},
        "system text, tools of the run": {"messages": [START[0], *called], "tools": schemas},
        "tools": {"messages": ONE_CALL[1:], "tools": TOOLS},
        "system text with tools": {"messages": [described, *ONE_CALL[1:]]},
        "system text with tools, tools": {"messages": [described, *ONE_CALL[1:]], "tools": TOOLS},
    }


@pytest.mark.slow
@pytest.mark.parametrize("config", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_kind_of_prompt_has_the_ids_of_the_request(tmp_path: Path, family: str, config: str) -> None:
    kind, options = FAMILY_KINDS[family], DIALOGUES[config]
    exported = export_chat(tmp_path / "exported", kind, options)
    dialogue = build_dialogue_format(options, MATH_PYTHON)
    prompts = list_prompts(dialogue.system, [json.loads(tool.to_json()) for tool in dialogue.tools])
    learned = tokenize_rows(tmp_path, kind, options, [*prompts.values()])
    for row, each in zip(prompts.values(), learned, strict=True):
        assert_same_ids(exported, row["messages"], row.get("tools"), each)


def test_tools_of_a_row_follow_the_system_text_of_a_run_without_tools(tmp_path: Path) -> None:
    exported = export_chat(tmp_path / "exported", FAMILY_KINDS["qwen3"], BARE)
    trained = {"role": "system", "content": "Be brief."}
    rows = [{"messages": [trained, *ONE_CALL[1:]], "tools": TOOLS}, {"messages": [trained, START[1], ANSWER]}]
    learned = tokenize_rows(tmp_path, FAMILY_KINDS["qwen3"], BARE, rows)
    for row, each, has_tools in zip(rows, learned, (True, False), strict=True):
        assert_same_ids(exported, row["messages"], row.get("tools"), each)
        text = exported.decode(each.token_ids)
        assert ("get_time" in text, "Solve it: " in text) == (has_tools, not has_tools)


def test_a_row_with_a_system_text_and_calls_has_the_ids_of_the_whole_request(tmp_path: Path) -> None:
    """Unless a request has `tools`, its prompt before the first call has no tools."""
    kind, options = FAMILY_KINDS["qwen3"], DIALOGUES["default"]
    exported = export_chat(tmp_path / "exported", kind, options)
    messages = [START[0], *list_prompts("", [])["tools of the run"]["messages"]]
    (learned,) = tokenize_rows(tmp_path, kind, options, [{"messages": messages}])
    assert render(exported, messages) == learned.token_ids


def test_arguments_in_json_text_are_rendered_unchanged(tmp_path: Path) -> None:
    exported = export_chat(tmp_path, FAMILY_KINDS["qwen3"], DIALOGUES["default"])
    call = {"name": "get_weather", "arguments": '{"city":"Z\\u00fcrich"}'}
    token_ids = render(exported, [*START, {"role": "assistant", "tool_calls": [{"function": call}]}], TOOLS)
    assert '{"name": "get_weather", "arguments": {"city":"Z\\u00fcrich"}}' in exported.decode(token_ids)
