"""Tests: each call of a cold-start row has one result, in the order of calls; otherwise the row is unusable."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.engine.data.data_files import BadRows, DatasetRow, RowDefect
from asterism.engine.data.dialogue_messages import DatasetLocation, DialogueMessage
from asterism.engine.data.result_order import DEFECT, order_results
from asterism.engine.data.sft_dialogues import describe_bad_rows
from asterism.policies.dialogue.json_calls import format_tool_call
from tests.engine.data.cold_start_rows import ANSWER, QUESTION, read_row, read_rows

IN_TEXT = format_tool_call("jupyter_code", {"code": "0"})
TAGGED = "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
HERE = DatasetLocation(DatasetRow(Path("some.jsonl"), 1, {}), "messages[2]")


def make_turn(*ids: Any, text: str = "") -> dict[str, Any]:
    calls = [
        {"id": each, "type": "function", "function": {"name": "jupyter_code", "arguments": {"code": str(number)}}}
        for number, each in enumerate(ids)
    ]
    return {"role": "assistant", "content": f"<reason>r</reason>{text}", "tool_calls": calls}


def make_result(text: str, call_id: Any = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def list_rendered(folder: Path, *messages: Any) -> list[str]:
    """Return the results in the rendered dialogue. These messages follow the question."""
    text = read_row(folder / "a.jsonl", QUESTION, *messages).text
    return [part.partition("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_results_have_the_order_of_calls_for_any_order_in_the_file(tmp_path: Path, order: list[int]) -> None:
    results = [make_result(f"result {place}", f"call_{place}") for place in order]
    found = list_rendered(tmp_path, make_turn("call_0", "call_1", "call_2"), *results, ANSWER)
    assert found == ["result 0", "result 1", "result 2"]


@pytest.mark.parametrize(
    ("turn", "results", "expected"),
    [
        (make_turn(None, None), [make_result("a"), make_result("b")], ["a", "b"]),
        (make_turn("x", "y"), [make_result("a"), make_result("b")], ["a", "b"]),
        (make_turn("x", "y"), [make_result("a", ""), make_result("b", "")], ["a", "b"]),
        (make_turn(None, None), [make_result("a", "x"), make_result("b", "y")], ["a", "b"]),
        (make_turn(1, 2), [make_result("b", 2), make_result("a", 1)], ["a", "b"]),
        (make_turn("x", text=IN_TEXT), [make_result("b", "x"), make_result("a")], ["a", "b"]),
        (make_turn(text=IN_TEXT + IN_TEXT), [make_result("a"), make_result("b")], ["a", "b"]),
        (make_turn("x", "y"), [make_result('[{"n": 1}, "b"]')], ['{"n": 1}', "b"]),
        (make_turn("x"), [make_result('[{"n": 1}]')], ['[{"n": 1}]']),
        (make_turn(text="<tool_call>{"), [make_result("a")], ["a"]),
        (make_turn("x", "y"), [make_result(TAGGED)], ["a", "b"]),
    ],
)
def test_calls_and_results_without_ids_keep_their_order(
    tmp_path: Path, turn: Any, results: list[Any], expected: list[str]
) -> None:
    assert list_rendered(tmp_path, turn, *results, ANSWER) == expected


@pytest.mark.parametrize(
    ("turn", "results", "problem"),
    [
        (make_turn("x", "y"), [make_result("a", "x")], "1 results for 2 calls"),
        (make_turn("x"), [make_result("a", "x"), make_result("b", "y")], "2 results for 1 calls"),
        (make_turn(), [make_result("a")], "1 results for 0 calls"),
        (make_turn("x", "y"), [make_result("a", "x"), make_result("b", "z")], "the id 'z' belongs to no call"),
        (make_turn("x", "y"), [make_result("a", "x"), make_result("b", "x")], "the id 'x' belongs to no call"),
        (make_turn("x", "y"), [make_result("a", "x"), make_result("b")], "no id belongs to no call"),
        (make_turn("x", "x"), [make_result("a", "x"), make_result("b", "x")], "several calls .* have the id 'x'"),
        (make_turn("x", "y"), [make_result("[1, 2, 3]")], "1 results for 2 calls"),
        (make_turn("x", "y"), [QUESTION], "0 results for 2 calls"),
    ],
)
def test_a_missing_surplus_or_unknown_result_makes_the_row_unusable(
    tmp_path: Path, turn: Any, results: list[Any], problem: str
) -> None:
    with pytest.raises(RowDefect, match=problem) as caught:
        list_rendered(tmp_path, turn, *results, ANSWER)
    assert caught.value.kind == DEFECT


def test_a_user_turn_can_contain_results_in_tags(tmp_path: Path) -> None:
    tagged = {"role": "user", "content": TAGGED}
    assert list_rendered(tmp_path, make_turn("x", "y"), tagged, ANSWER) == ["a", "b"]
    with pytest.raises(RowDefect, match="2 results for 1 calls"):
        list_rendered(tmp_path, make_turn("x"), tagged, ANSWER)


def test_calls_at_the_end_of_a_dialogue_need_no_result(tmp_path: Path) -> None:
    assert list_rendered(tmp_path, make_turn("x", "y")) == []


def test_unusable_rows_are_counted_by_their_kind(tmp_path: Path) -> None:
    missing = [QUESTION, make_turn("x", "y"), make_result("a"), ANSWER]
    broken = [QUESTION, {"role": "assistant", "content": "r</reason>a</reason>"}]
    rows, bad_rows = ({"messages": each} for each in ([QUESTION, ANSWER], missing, missing, broken)), BadRows(3)
    assert len(read_rows(tmp_path / "a.jsonl", *rows, bad_rows=bad_rows)) == 1
    described = describe_bad_rows(bad_rows.errors)
    assert "; 2 with other results than calls; 1 with broken tags of reasoning" in described


@given(
    st.lists(st.sampled_from(["", "x", "y", "z"]), max_size=4), st.lists(st.sampled_from(["", "x", "y"]), max_size=4)
)
def test_any_ids_give_each_call_one_result_or_an_error(call_ids: list[str], ids: list[str]) -> None:
    turn = [
        DialogueMessage("tool", {"content": f"{number} of {each}", "tool_call_id": each}, HERE)
        for number, each in enumerate(ids)
    ]
    if not turn:
        return
    try:
        results = order_results(turn, call_ids)
    except RowDefect:
        return
    assert sorted(results) == sorted(message.get_text() for message in turn)
    if any(ids) and any(call_ids):
        assert [text.partition(" of ")[2] for text in results] == call_ids
