"""Tests: in a cold-start turn every reasoning tag has its counterpart; otherwise the row is unusable."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.engine.data.data_files import DatasetError, DatasetRow, RowDefect
from asterism.engine.data.dialogue_messages import BROKEN_TAGS, DatasetLocation, DialogueMessage

HERE = DatasetLocation(DatasetRow(Path("some.jsonl"), 1, {}), "messages[1]")
ANSWER = "<answer>\\boxed{1}</answer>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"code": "print(\'</reason></think>\')"}}\n</tool_call>'


def get_turn(content: str, prefill: str = "<reason>", **fields: Any) -> str:
    return DialogueMessage("assistant", {"content": content, **fields}, HERE).get_turn_text(prefill)


@pytest.mark.parametrize(
    ("content", "turn"),
    [
        (f"<reason>r</reason>\n{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f"\n<reason>r</reason>\n{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f" \t<reason>r</reason>{ANSWER}", f"<reason>r</reason>{ANSWER}"),
        (f"r</reason>\n{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f"r\n</think>\n{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f"\n r </think>\n\n{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f"<think>r</think>{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f" <think>r</think>\n{ANSWER}", f"<reason>r</reason>\n{ANSWER}"),
        (f"</think>{ANSWER}", f"<reason></reason>\n{ANSWER}"),
        (f"</reason>{ANSWER}", f"<reason></reason>\n{ANSWER}"),
        ("r</think>", "<reason>r</reason>"),
        (ANSWER, f"<reason></reason>\n{ANSWER}"),
        (CALL, f"<reason></reason>\n{CALL}"),
        (f"r</reason>\n{CALL}", f"<reason>r</reason>\n{CALL}"),
        (f"<reason>a</reason>b<reason>c</reason>{ANSWER}", f"<reason>a</reason>b<reason>c</reason>{ANSWER}"),
        ("<reason>a prefix without other tags", "<reason>a prefix without other tags"),
        ("1 < 2 and <b>bold</b>", "<reason></reason>\n1 < 2 and <b>bold</b>"),
    ],
)
def test_the_first_reasoning_of_a_turn_is_enclosed_in_one_pair_of_tags(content: str, turn: str) -> None:
    assert get_turn(content) == turn


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        *((ANSWER, {"reasoning_content": "r"}), (ANSWER, {"reasoning": "r"})),
        (ANSWER, {"thinking": "r", "reasoning": None}),
        (f"<think>r</think>{ANSWER}", {"reasoning_content": ""}),
        (ANSWER, {"reasoning_content": "", "reasoning": "r"}),
    ],
)
def test_reasoning_of_a_field_is_enclosed_in_the_tags_of_the_prefill(content: str, fields: dict[str, Any]) -> None:
    assert get_turn(content, **fields) == f"<reason>r</reason>\n{ANSWER}"


def test_reasoning_gets_think_tags_without_a_prefill() -> None:
    assert get_turn(ANSWER, "", reasoning_content="r") == f"<think>r</think>\n{ANSWER}"
    assert get_turn(ANSWER, "") == ANSWER


def test_the_content_must_begin_with_a_prefill_that_has_no_tag() -> None:
    with pytest.raises(DatasetError, match=r"`messages\[1\]\.content`: must start with Well, , the prefill"):
        get_turn("Three.", "Well, ")


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        *(("r</reason>a</reason>", {}), ("<reason>a<reason>b</reason>", {}), ("<reason>a</reason>b</reason>", {})),
        ("<reason>a</reason>b<reason>c", {}),
        ("<reason><think>a</think></reason>", {}),
        *(("<reason>a</think>b", {}), ("<think>a</reason>b", {}), ("<think>a", {}), ("a</think>b</think>c", {})),
        ("a<think>b", {}),
        ("<reason>a</reason>b", {"reasoning_content": "c"}),
        (" <think>a</think>b", {"reasoning_content": "c"}),
        ("a</think>b", {"reasoning": "c"}),
        ("b", {"reasoning": "<think>c</think>"}),
        ("b", {"thinking": "c</reason>"}),
    ],
)
def test_a_tag_without_its_counterpart_makes_the_row_unusable(content: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RowDefect, match=re.escape("some.jsonl: row 1, field `messages[1]`: has ")) as caught:
        get_turn(content, **fields)
    assert caught.value.kind == BROKEN_TAGS


@pytest.mark.parametrize(
    ("content", "reasoning", "rest"),
    [
        ("<think>r</think>\n\na", "r", "a"),
        ("r</think>a", "r", "a"),
        ("  r\n</think>\na", "r", "a"),
        ("a", "", "a"),
        (CALL, "", CALL),
    ],
)
def test_a_family_renderer_gets_reasoning_and_text_separately(content: str, reasoning: str, rest: str) -> None:
    message = DialogueMessage("assistant", {"content": content}, HERE)
    assert message.split_reasoning() == (reasoning, rest)


@pytest.mark.parametrize("content", ["a</think>b</think>", "<think>a<think>b</think>c", "a<think>b", "<think>a"])
def test_a_family_renderer_refuses_unpaired_tags(content: str) -> None:
    with pytest.raises(RowDefect, match="reasoning needs its pair"):
        DialogueMessage("assistant", {"content": content}, HERE).split_reasoning()


@pytest.mark.parametrize("content", ["r</think>a", "<think>a", "a<think>b</think></think>"])
def test_unpaired_think_tags_are_refused_without_a_prefill(content: str) -> None:
    with pytest.raises(RowDefect):
        get_turn(content, prefill="")


TEXTS = st.lists(
    st.sampled_from(["<reason>", "</reason>", "<think>", "</think>", "a", " ", "\n", CALL, ANSWER, "<tool_call>"]),
    max_size=7,
).map("".join)


@given(TEXTS, st.sampled_from(["", "<reason>", "<think>", "<reason>\n"]))
def test_every_accepted_turn_starts_with_the_prefill_and_has_paired_tags(content: str, prefill: str) -> None:
    try:
        turn = get_turn(content, prefill)
    except RowDefect:
        return
    assert turn.startswith(prefill)
    bare = turn.replace(CALL, "").partition("<tool_call>")[0]
    tag = prefill.strip("<>\n") or "think"
    opened = bare.count(f"<{tag}>")
    assert bare.count(f"</{tag}>") in ((opened, 0) if opened == 1 else (opened,))
