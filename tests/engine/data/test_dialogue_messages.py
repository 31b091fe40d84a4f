"""Tests: cold-start dialogues in all public layouts give the same turns."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.engine.data.data_files import DatasetRow
from asterism.engine.data.dialogue_messages import DatasetLocation, DialogueMessage
from asterism.policies.dialogue.json_calls import format_tool_call
from tests.engine.data.cold_start_rows import read_rows
from tests.engine.data.public_layouts import say, write_sharegpt

CALLS = [{"code": "print(1)"}, {"code": "print(2)"}]
FUNCTIONS = [{"name": "jupyter_code", "arguments": arguments} for arguments in CALLS]
TOOL_CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {**each, "arguments": json.dumps(each["arguments"])}}
    for number, each in enumerate(FUNCTIONS)
]
RESULTS = [{"role": "tool", "tool_call_id": f"call_{number}", "content": str(number + 1)} for number in range(2)]
TOOLS = [{"type": "function", "function": {"name": "jupyter_code", "parameters": {"type": "object"}}}]
RUN_PROMPT = SftFileConfig(name="some", data="", prompt="run")
ANSWER = "<answer>\\boxed{3}</answer>"
USER = say("user", "1+2?")
LAYOUTS: dict[str, dict[str, Any]] = {
    "openai": {
        "tools": TOOLS,
        "messages": [
            *(say("system", "Use the tool."), USER, say("assistant", None, tool_calls=TOOL_CALLS)),
            *(*RESULTS, say("assistant", ANSWER)),
        ],
    },
    "content parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]},
            *(say("assistant", "", tool_calls=FUNCTIONS), *RESULTS),
            {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        ]
    },
    "think tags": {
        "messages": [
            *(USER, say("assistant", "<think></think>\n\n", tool_calls=TOOL_CALLS)),
            *(*RESULTS, say("assistant", f"<think></think>\n\n{ANSWER}")),
        ]
    },
    "sharegpt list": {
        "conversations": write_sharegpt(
            **{"system": "Use the tool.", "human": "1+2?", "gpt1": "", "function_call": json.dumps(FUNCTIONS)},
            **{"observation1": "1", "observation2": "2", "gpt": ANSWER},
        )
    },
}


def test_every_layout_gives_the_same_turns(tmp_path: Path) -> None:
    """The turns and prompts have equal token ids."""
    found = read_rows(tmp_path / "some.jsonl", *LAYOUTS.values(), file=RUN_PROMPT)
    masks = [zip(row.dialogue.token_ids, row.dialogue.loss_mask, strict=True) for row in found]
    assert len({tuple(token for token, in_loss in mask if not in_loss) for mask in masks}) == 1
    calls = "\n".join(format_tool_call("jupyter_code", arguments) for arguments in CALLS)
    expected = f"</reason>\n{calls}<|im_end|></reason>\n{ANSWER}<|im_end|>"
    assert {name: row.generated for name, row in zip(LAYOUTS, found, strict=True)} == dict.fromkeys(LAYOUTS, expected)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            [{"id": 3, "text": "hi"}, {"id": 4, "text": "there"}],
            '[{"id": 3, "text": "hi"}, {"id": 4, "text": "there"}]',
        ),
        ([], "[]"),
        ([{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}], "hi there"),
    ],
)
def test_a_result_can_be_a_json_list(tmp_path: Path, content: Any, text: str) -> None:
    message = DialogueMessage("tool", {"content": content}, DatasetLocation(DatasetRow(tmp_path, 1, {}), "messages[1]"))
    assert message.get_results() == [text]
