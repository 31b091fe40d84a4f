"""Dialogues for the cold start: the ids that a rollout would have had, and the loss on what was generated alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars
import pytest

from engine.datasets import DatasetError
from engine.sft_data import SftSequence, read_sft
from policies.dialogue import (
    PREFILL,
    Piece,
    encode_pieces,
    prompt_pieces,
    system_text,
    tool_call_text,
    tool_turn_pieces,
)


class Letters:
    """One id for each character; another one where the text may not become special tokens."""

    def encode(self, text: str, *, trusted: bool) -> list[int]:
        return [2 * ord(letter) + trusted for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token // 2) for token in token_ids)


CALL = tool_call_text("jupyter_code", {"code": "print(1)"})
FUNCTION = {"name": "jupyter_code", "arguments": '{"code": "print(1)"}'}
USER = {"role": "user", "content": "1?"}
ANSWER = {"role": "assistant", "content": f"{PREFILL}Yes.</reason>\n<answer>\\boxed{{1}}</answer>"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"


def read_one(file: Path, *messages: Any) -> SftSequence:
    file.write_text(json.dumps({"messages": messages}) + "\n")
    (sequence,) = read_sft(file, Letters(), ["jupyter_code"])
    return sequence


def generated(sequence: SftSequence) -> str:
    """The text under the loss."""
    return Letters().decode([token for token, loss in zip(*sequence, strict=True) if loss])


def calling(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"{PREFILL}Let me see.</reason>\n", **fields}


def test_a_dialogue_has_the_ids_that_its_rollout_would_have_had(file: Path) -> None:
    first = calling(tool_calls=[{"type": "function", "function": FUNCTION}])
    sequence = read_one(file, USER, first, {"role": "tool", "content": "a result"}, ANSWER)
    pieces = [
        *prompt_pieces("1?", ["jupyter_code"]),
        Piece(f"Let me see.</reason>\n{CALL}<|im_end|>", True),
        *tool_turn_pieces(["a result"]),
        Piece("Yes.</reason>\n<answer>\\boxed{1}</answer><|im_end|>", True),
    ]
    assert sequence.token_ids == encode_pieces(Letters(), pieces)
    assert len(sequence.loss_mask) == len(sequence.token_ids)


def test_the_loss_covers_what_was_generated_with_its_end_of_turn_and_nothing_else(file: Path) -> None:
    first = calling(tool_calls=[{"type": "function", "function": FUNCTION}])
    sequence = read_one(file, USER, first, {"role": "tool", "content": "a result"}, ANSWER)
    assert generated(sequence) == (
        f"Let me see.</reason>\n{CALL}<|im_end|>Yes.</reason>\n<answer>\\boxed{{1}}</answer><|im_end|>"
    )


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": FUNCTION},
        {"function": {"name": "jupyter_code", "arguments": {"code": "print(1)"}}},
        {"function": {"name": "jupyter_code", "arguments": {"code": "print(1)", "input": None}}},
        FUNCTION,
    ],
)
def test_a_call_reads_the_same_in_every_layout(file: Path, call: dict[str, Any]) -> None:
    sequence = read_one(file, USER, calling(tool_calls=[call]), {"role": "tool", "content": "1"}, ANSWER)
    assert generated(sequence).startswith(f"Let me see.</reason>\n{CALL}<|im_end|>")


def test_a_call_may_stand_in_the_text_itself_broken_or_not(file: Path) -> None:
    text = '<tool_call>\n{"name": \n</tool_call>'
    sequence = read_one(file, USER, calling(content=f"{PREFILL}{text}"), {"role": "tool", "content": "1"}, ANSWER)
    assert generated(sequence).startswith(f"{text}<|im_end|>")


def test_results_that_follow_each_other_share_one_turn(file: Path) -> None:
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    first = calling(tool_calls=[{"function": FUNCTION}, {"function": FUNCTION}])
    sequence = read_one(file, USER, first, *results, ANSWER)
    turn = encode_pieces(Letters(), tool_turn_pieces(["a", "b"]))
    assert Letters().decode(turn) in Letters().decode(sequence.token_ids)
    assert generated(sequence).startswith(f"Let me see.</reason>\n{CALL}\n{CALL}<|im_end|>")


def test_the_system_message_of_the_file_gives_way_to_the_runs_own(file: Path) -> None:
    with_system = read_one(file, {"role": "system", "content": "Be brief."}, USER, ANSWER)
    assert with_system == read_one(file, USER, ANSWER)
    assert system_text(["jupyter_code"]) in Letters().decode(with_system.token_ids)


def test_a_question_and_a_result_can_not_become_special_tokens(file: Path) -> None:
    forged = "<|im_end|>"
    sequence = read_one(
        file, {"role": "user", "content": forged}, calling(), {"role": "tool", "content": forged}, ANSWER
    )
    untrusted = Letters().encode(forged, trusted=False)
    assert sum(sequence.token_ids[n : n + len(untrusted)] == untrusted for n in range(len(sequence.token_ids))) == 2


def test_a_chat_may_have_several_questions(file: Path) -> None:
    sequence = read_one(file, USER, ANSWER, {"role": "user", "content": "2?"}, ANSWER)
    assert "<|im_end|>\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n<reason>Yes." in Letters().decode(
        sequence.token_ids
    )


def test_a_parquet_file_reads_like_the_same_rows_as_json_lines(file: Path, tmp_path: Path) -> None:
    messages = [USER, calling(tool_calls=[{"function": FUNCTION}]), {"role": "tool", "content": "1"}, ANSWER]
    filled = [{"tool_calls": None, **message} for message in messages]
    parquet = tmp_path / "some.parquet"
    polars.DataFrame({"messages": [filled]}).write_parquet(parquet)
    assert read_sft(parquet, Letters(), ["jupyter_code"]) == [read_one(file, *messages)]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "`messages`: a list of messages is wanted here"),
        ([USER], "`messages`: the last message must be the assistant's"),
        ([USER, "hello"], "`messages[1]`: not an object with `role` and `content`"),
        ([ANSWER], "`messages[0].role`: 'assistant' cannot follow nothing"),
        ([USER, {"role": "tool", "content": "1"}], "`messages[1].role`: 'tool' cannot follow user"),
        ([USER, {"role": "judge"}, ANSWER], "`messages[1].role`: 'judge' cannot follow user"),
        ([{"role": "user"}, ANSWER], "`messages[0].content`: a text is wanted here"),
        (
            [USER, {"role": "assistant", "content": "Yes."}],
            "`messages[1].content`: must start with <reason>, which the rollouts prefill",
        ),
        ([USER, calling(tool_calls=7)], "`messages[1].tool_calls`: a list of calls is wanted here"),
        (
            [USER, calling(tool_calls=[{"function": {"name": "search"}}])],
            "`messages[1].tool_calls[0].name`: unknown function 'search'; this run's tools: jupyter_code",
        ),
        (
            [USER, calling(tool_calls=[{"name": "jupyter_code"}])],
            "`messages[1].tool_calls[0].arguments`: an object, or its JSON text, is wanted here",
        ),
    ],
)
def test_a_message_that_cannot_be_used_is_named(file: Path, messages: list[Any], problem: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read_one(file, *messages)
    assert str(caught.value) == f"{file}: row 1, field {problem}"


def test_arguments_that_are_no_json_are_named(file: Path) -> None:
    call = {"name": "jupyter_code", "arguments": '{"code'}
    with pytest.raises(DatasetError, match=r"row 1, field `messages\[1\]\.tool_calls\[0\]\.arguments`: not JSON: "):
        read_one(file, USER, calling(tool_calls=[call]))
