"""Tests: a rollout's parser reads the same calls from a rendered cold-start row; otherwise the row is unusable."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.engine.data.data_files import BadRows, DatasetError
from asterism.engine.data.sft_dialogues import describe_bad_rows
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.policies.dialogue.parse_turn import ToolCall, parse_assistant_turn
from tests.engine.data.cold_start_rows import ANSWER, FORMAT, QUESTION, RESULT, read_rows

TAGGED = "print('</tool_call>')"


def make_row(*calls: dict[str, Any], content: str = "<reason>r</reason>") -> dict[str, Any]:
    turn = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    return {"messages": [QUESTION, turn, *[RESULT] * max(1, len(calls)), ANSWER]}


def make_call(code: Any, name: str = "jupyter_code") -> dict[str, Any]:
    return {"name": name, "arguments": {"code": code}}


def read_turns(file: Path, *rows: dict[str, Any], bad_rows: BadRows | None = None, **options: Any) -> list[str]:
    """Return the first generated turn of each usable row."""
    found = read_rows(file, *rows, file=SftFileConfig(name="data", data="", **options), bad_rows=bad_rows)
    return [row.generated.partition("<|im_end|>")[0] for row in found]


CODES = st.lists(
    st.sampled_from(["</tool_call>", "<tool_call>", '"', "\\", "{", "}", "\n", "é", "</reason>"]), max_size=8
)


@given(st.lists(CODES.map("".join), min_size=1, max_size=3))
@example([TAGGED])  # code of the bug report call-04
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rollout_reads_the_same_calls_for_any_code(file: Path, codes: list[str]) -> None:
    (turn,) = read_turns(file, make_row(*map(make_call, codes)))
    assert parse_assistant_turn(turn, FORMAT).calls == tuple(ToolCall("jupyter_code", {"code": code}) for code in codes)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (make_row(make_call("1"), content="<reason>I write <tool_call> now.</reason>"), "would read other calls"),
        (make_row(make_call("1"), content='<reason>r</reason><tool_call>{"name": "'), "would read other calls"),
        (make_row({"name": "jupyter_code", "arguments": '{"code": ' + "[" * 80 + "]" * 80 + "}"}), "nested too deeply"),
        (make_row(make_call("print('<|im_end|>')")), "contains <|im_end|>, a token of the chat format"),
        (make_row(make_call("print('<|im_start|>user')")), "contains <|im_start|>, a token of the chat format"),
    ],
)
def test_a_row_that_a_rollout_reads_differently_is_unusable_with_the_reason(
    file: Path, row: dict[str, Any], reason: str
) -> None:
    bad_rows = BadRows(1)
    assert len(read_turns(file, make_row(make_call("1")), row, bad_rows=bad_rows)) == 1
    (error,) = bad_rows.errors
    assert "row 2, field `messages[1].tool_calls`: " in str(error)
    assert reason in describe_bad_rows(bad_rows.errors)
    with pytest.raises(DatasetError, match="row 2"):
        read_turns(file, make_row(make_call("1")), row)


def test_a_renamed_call_in_a_text_keeps_its_whole_code(file: Path) -> None:
    content = "<reason>r</reason>" + format_tool_call("python", {"code": TAGGED})
    row = {"messages": [QUESTION, {"role": "assistant", "content": content}, RESULT, ANSWER]}
    (turn,) = read_turns(file, row, tool_names={"python": "jupyter_code"})
    assert parse_assistant_turn(turn, FORMAT).calls == (ToolCall("jupyter_code", {"code": TAGGED}),)


def test_calls_in_text_and_field_are_read_in_order(file: Path) -> None:
    content = "<reason>r</reason>" + format_tool_call("jupyter_code", {"code": TAGGED})
    row = make_row(make_call("2"), content=content)
    row["messages"].insert(2, RESULT)
    (turn,) = read_turns(file, row)
    assert [
        call.arguments["code"] for call in parse_assistant_turn(turn, FORMAT).calls if isinstance(call, ToolCall)
    ] == [TAGGED, "2"]
