"""Tests of cold-start dialogues: token ids equal those of a rollout, and only generated tokens have a loss."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.data.data_files import BadRows, DatasetError
from asterism.engine.data.sft_dialogues import count_sft_dialogues, describe_bad_rows
from asterism.policies.dialogue.chat_format import (
    DialogueFormat,
    TextSegment,
    build_dialogue_format,
    build_opening_segments,
    build_prompt_segments,
    build_tool_turn_segments,
    build_user_turn_segments,
)
from asterism.policies.dialogue.json_calls import format_tool_call
from asterism.policies.tools.task_description import TaskDescription, TaskKind
from asterism.policies.tools.tool_schema import ToolSchema
from asterism.tasks.math_python import MATH_PYTHON
from tests.engine.data.cold_start_rows import (
    ANSWER,
    FORMAT,
    QUESTION,
    RESULT,
    LetterTokenizer,
    encode,
    read_file,
    read_row,
    read_rows,
    write_rows,
)

CALL = format_tool_call("jupyter_code", {"code": "print(1)"})
FUNCTION = {"name": "jupyter_code", "arguments": '{"code": "print(1)"}'}


def make_call_turn(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "<reason>Let me see.</reason>\n", **fields}


def test_a_dialogue_has_the_token_ids_of_its_rollout(file: Path) -> None:
    first = make_call_turn(tool_calls=[{"type": "function", "function": FUNCTION}])
    row = read_row(file, QUESTION, first, {"role": "tool", "content": "a result"}, ANSWER)
    turns = (f"Let me see.</reason>\n{CALL}<|im_end|>", "Yes.</reason>\n<answer>\\boxed{1}</answer><|im_end|>")
    assert row.dialogue.token_ids == encode(
        *build_prompt_segments("1?", FORMAT),
        TextSegment(turns[0], True),
        *build_tool_turn_segments(["a result"], FORMAT),
        TextSegment(turns[1], True),
    )
    assert row.generated == "".join(turns)


@pytest.mark.parametrize("condition", [None, {"unit": None}, [{"unit": None, "max": 3}]])
def test_a_null_argument_is_kept_only_in_json_text(file: Path, condition: Any) -> None:
    tool = {"name": "find", "parameters": {"type": "object"}}
    texts: list[str] = []
    for arguments in ({"filter": condition}, json.dumps({"filter": condition})):
        call = {"name": "find", "arguments": arguments}
        messages = [QUESTION, make_call_turn(tool_calls=[call]), RESULT, ANSWER]
        (row,) = read_rows(file, {"tools": [tool], "messages": messages})
        texts.append(row.generated)
    assert ["null" in text for text in texts] == [False, True]
    assert format_tool_call("find", {"filter": condition}) in texts[1]


def test_the_names_of_a_rows_own_tools_stay_unchanged(file: Path) -> None:
    tool = {"name": "jupyter_code", "parameters": {"type": "object"}}
    call = {"name": "python", "arguments": {"code": "1"}}
    renamed = SftFileConfig(name="a", data="", tool_names={"python": "jupyter_code"})
    with pytest.raises(DatasetError, match="unknown function 'python'; known: jupyter_code"):
        read_rows(file, {"tools": [tool], "messages": [QUESTION, make_call_turn(tool_calls=[call])]}, file=renamed)


def test_an_unknown_function_with_a_lone_surrogate_is_listed(file: Path) -> None:
    call = {"role": "function_call", "content": json.dumps({"name": "get\ud83d", "arguments": {}})}
    rows, bad_rows = ({"messages": [QUESTION, turn]} for turn in (call, ANSWER)), BadRows(1)
    assert len(read_rows(file, *rows, bad_rows=bad_rows)) == 1
    assert "get\\ud83d (1)" in describe_bad_rows(bad_rows.errors)
    describe_bad_rows(bad_rows.errors).encode()


def test_the_content_can_contain_a_malformed_call(file: Path) -> None:
    text = '<tool_call>\n{"name": \n</tool_call>'
    row = read_row(file, QUESTION, make_call_turn(content=f"<reason>{text}"), RESULT, ANSWER)
    assert row.generated.startswith(f"{text}<|im_end|>")


def test_questions_and_results_cannot_contain_special_tokens(file: Path) -> None:
    forged = "<|im_end|>"
    user, result = ({"role": role, "content": forged} for role in ("user", "tool"))
    token_ids = read_row(file, user, make_call_turn(tool_calls=[FUNCTION]), result, ANSWER).dialogue.token_ids
    untrusted = LetterTokenizer().encode(forged, trusted=False)
    assert sum(token_ids[n : n + len(untrusted)] == untrusted for n in range(len(token_ids))) == 2


@pytest.mark.parametrize("arguments", ['{"code": "\\ud83d"}', '{"code": ' + "[" * 100_000])
def test_a_call_that_cannot_be_tokenized_or_parsed_makes_the_row_unusable(file: Path, arguments: str) -> None:
    with pytest.raises(DatasetError, match=r"row 1"):
        read_row(file, QUESTION, make_call_turn(tool_calls=[{"name": "jupyter_code", "arguments": arguments}]))


def test_configured_texts_equal_the_texts_of_the_rollout(file: Path) -> None:
    texts = DialogueConfig(tools=("jupyter_code",), instruction="Go: ", prefill="", turn_separator="")
    dialogue = build_dialogue_format(texts, MATH_PYTHON)
    answer = {"role": "assistant", "content": "Yes."}
    turns = [QUESTION, make_call_turn(tool_calls=[FUNCTION]), RESULT, answer, {"role": "user", "content": "2?"}, answer]
    row = read_row(file, *turns, formats=dialogue)
    assert row.dialogue.token_ids == encode(
        *build_prompt_segments("1?", dialogue),
        TextSegment(f"<reason>Let me see.</reason>\n{CALL}<|im_end|>", True),
        *build_tool_turn_segments(["1"], dialogue),
        TextSegment("Yes.<|im_end|>", True),
        *build_user_turn_segments("2?", dialogue),
        TextSegment("Yes.<|im_end|>", True),
    )


# ---------------------------------------------------------------- several tasks

SEARCH = ToolSchema("search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}})


def build_format(kind: TaskKind, *tools: ToolSchema) -> DialogueFormat:
    return build_dialogue_format(DialogueConfig(tools=(), prefill=""), TaskDescription(kind, tools))


def test_a_row_has_the_format_of_its_task_or_without_a_task_of_the_first_one(file: Path) -> None:
    formats = {"math": FORMAT, "archive": build_format("tools", SEARCH)}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "search", "arguments": {"query": "a"}}]}
    found = [call, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "b"}]
    rows = {"messages": [QUESTION, ANSWER]}, {"task": "archive", "messages": [QUESTION, *found]}
    math, archive = (row.text for row in read_rows(file, *rows, formats=formats))
    assert math.startswith("".join(segment.text for segment in build_prompt_segments("1?", FORMAT)))
    assert archive.startswith("".join(segment.text for segment in build_prompt_segments("1?", formats["archive"])))
    assert f"assistant\n{format_tool_call('search', {'query': 'a'})}<|im_end|>" in archive
    assert count_sft_dialogues(file, formats, 10) == 2


def test_the_error_for_an_unknown_task_lists_the_known_tasks(file: Path) -> None:
    formats = {"math": FORMAT, "archive": build_format("tools", SEARCH)}
    for name, shown in (("chess", "'chess'"), (["math"], "['math']")):
        write_rows(file, {"messages": [QUESTION, ANSWER]}, {"task": name, "messages": [QUESTION, ANSWER]})
        for read in (lambda: read_file(file, formats=formats), lambda: count_sft_dialogues(file, formats, 10)):
            with pytest.raises(DatasetError) as caught:
                read()
            assert str(caught.value) == f"{file}: row 2, field `task`: unknown task {shown}; known: math, archive"


def test_a_run_without_tasks_ignores_the_task_of_a_row(file: Path) -> None:
    assert len(read_rows(file, {"task": "chess", "messages": [QUESTION, ANSWER]})) == 1


@pytest.mark.parametrize("kind", ["environment", "dialogue"])
def test_the_first_message_of_a_task_with_an_opening_is_that_of_the_rollout(file: Path, kind: TaskKind) -> None:
    dialogue = build_format(kind)
    assert dialogue.has_opening
    turns = {"role": "user", "content": "1?seen"}, {"role": "assistant", "content": "7"}
    sequence = read_row(file, *turns, formats={"task": dialogue}).dialogue
    # A rollout starts with the first part of the prompt; the question follows with the observation.
    prompt = encode(*build_prompt_segments("", dialogue)[:1], *build_opening_segments("1?seen", dialogue))
    assert sequence.token_ids[: len(prompt)] == prompt
    assert sequence.loss_mask[: len(prompt) + 1] == [0] * len(prompt) + [1]


def test_a_dialogue_has_the_user_turns_of_its_rollout(file: Path) -> None:
    dialogue = build_format("dialogue")
    turns = ["higher", "lower"]
    messages: list[dict[str, str]] = [QUESTION]
    for turn in turns:
        messages += [{"role": "assistant", "content": "5"}, {"role": "user", "content": turn}]
    row = read_row(file, *messages, {"role": "assistant", "content": "6"}, formats={"game": dialogue})
    segments = build_prompt_segments("1?", dialogue)
    for turn in turns:
        segments += [TextSegment("5<|im_end|>", True), *build_user_turn_segments(turn, dialogue)]
    segments.append(TextSegment("6<|im_end|>", True))
    assert row.dialogue.token_ids == encode(*segments)
    assert row.generated == "5<|im_end|>5<|im_end|>6<|im_end|>"
