"""Tokenizes cold-start dialogues as a rollout does, with a loss mask over the assistant's tokens.

Both encode the segments of policies/dialogue/chat_format.py one by one, so that training and
generation use the same token ids.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from engine.data.data_files import DatasetError, DatasetRow, RowFields, read_rows
from engine.data.dialogue_messages import DIALOGUE_COLUMNS, DatasetLocation, DialogueMessage, parse_messages
from policies.dialogue.chat_format import (
    TURN_END,
    DialogueFormat,
    TextSegment,
    TextTokenizer,
    build_prompt_segments,
    build_tool_turn_segments,
    build_user_turn_segments,
    encode_segments,
    format_tool_call,
)


class TokenizedDialogue(NamedTuple):
    token_ids: list[int]  # [T]
    loss_mask: list[int]  # [T]; 1 for tokens that the assistant generates, its end of turn included


def read_sft_dialogues(
    path: Path, tokenizer: TextTokenizer, formats: Mapping[str, DialogueFormat]
) -> list[TokenizedDialogue]:
    """One sequence per row, from its `messages`. Raises DatasetError with file, row and field.

    `formats`: by name of the task. The format's system message replaces the row's, so that the prompt equals that of
    the rollouts.
    """
    return list(iter_sft_dialogues(path, tokenizer, formats))


def iter_sft_dialogues(
    path: Path, tokenizer: TextTokenizer, formats: Mapping[str, DialogueFormat]
) -> Iterator[TokenizedDialogue]:
    """As read_sft_dialogues, one row at a time."""
    for row in read_rows(path, DIALOGUE_COLUMNS):
        yield _tokenize_dialogue(parse_messages(row), tokenizer, _choose_format(row, formats))


def count_sft_dialogues(path: Path, formats: Mapping[str, DialogueFormat], max_rows: int) -> int:
    """Checks that many dialogues without tokenizing them. Raises DatasetError."""
    rows = islice(read_rows(path, DIALOGUE_COLUMNS), max_rows)
    return sum(1 for row in rows if list(_render_turns(parse_messages(row), _choose_format(row, formats))))


def iter_sft_texts(path: Path, formats: Mapping[str, DialogueFormat], max_rows: int) -> Iterator[str]:
    """The texts of that many dialogues as they are tokenized. Raises DatasetError."""
    for row in islice(read_rows(path, DIALOGUE_COLUMNS), max_rows):
        for _, segments in _render_turns(parse_messages(row), _choose_format(row, formats)):
            yield from (segment.text for segment in segments)


def _choose_format(row: DatasetRow, formats: Mapping[str, DialogueFormat]) -> DialogueFormat:
    """That of the row's `task`, by default the first. A run without [[tasks]] ignores the field."""
    first = next(iter(formats))
    name = row.fields.get("task")
    if name is None or first == "":
        return formats[first]
    if not isinstance(name, str) or name not in formats:
        problem = f"unknown task {name!r:.80}; known: {', '.join(formats)}"
        raise DatasetError(row.path, problem, row=row.number, field="task")
    return formats[name]


def _tokenize_dialogue(
    messages: list[DialogueMessage], tokenizer: TextTokenizer, dialogue: DialogueFormat
) -> TokenizedDialogue:
    tokenized = TokenizedDialogue([], [])
    for role, segments in _render_turns(messages, dialogue):
        token_ids = encode_segments(tokenizer, segments)
        tokenized.token_ids.extend(token_ids)
        tokenized.loss_mask.extend([int(role == "assistant")] * len(token_ids))
    return tokenized


def _render_turns(messages: list[DialogueMessage], dialogue: DialogueFormat) -> Iterator[tuple[str, list[TextSegment]]]:
    """(role, segments) of each turn."""
    for first, (role, group) in enumerate(groupby(messages, key=lambda message: message.role)):
        turn = list(group)
        match role:
            case "assistant":
                yield role, [TextSegment(_format_assistant_text(turn[0], dialogue), True)]
            case "tool":
                yield role, build_tool_turn_segments([message.get_text() for message in turn], dialogue)
            case _:
                yield role, _build_user_segments(turn[0], dialogue, first=first == 0)


def _build_user_segments(message: DialogueMessage, dialogue: DialogueFormat, *, first: bool) -> list[TextSegment]:
    """The first user turn includes the system message and the instruction; later ones do not.

    If the task has an opening, the first message is the question with the observation after it.
    """
    text = message.get_text()
    if first:
        return build_prompt_segments(text.removeprefix(dialogue.instruction), dialogue)
    return build_user_turn_segments(text, dialogue)


def _format_assistant_text(message: DialogueMessage, dialogue: DialogueFormat) -> str:
    """The generated text of an assistant's turn: without the prefill, with the end of turn."""
    text = message.get_turn_text(dialogue.prefill).removeprefix(dialogue.prefill)
    calls = message.fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise message.location.build_error("expected a list of calls", "tool_calls")
    for number, call in enumerate(cast(list[Any], calls)):
        location = message.location._replace(field=f"{message.location.field}.tool_calls[{number}]")
        separator = "" if dialogue.prefill + text == "" or text.endswith("\n") else "\n"
        text += separator + _format_tool_call(call, location, dialogue)
    return text + TURN_END


def _format_tool_call(call: object, location: DatasetLocation, dialogue: DialogueFormat) -> str:
    """Accepts `{"name", "arguments"}` or that inside `function`; arguments as an object or JSON."""
    fields = cast(RowFields, call) if isinstance(call, dict) else {}
    function = cast(RowFields, fields["function"]) if isinstance(fields.get("function"), dict) else fields
    name, arguments = function.get("name"), function.get("arguments")
    tools = [tool.name for tool in dialogue.tools]
    if name not in tools:
        known = ", ".join(tools) or "none"
        raise location.build_error(f"unknown function {name!r}; known: {known}", "name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise location.build_error(f"not JSON: {error}", "arguments") from error
    if not isinstance(arguments, dict):
        raise location.build_error("expected an object or its JSON text", "arguments")
    # parquet fills absent keys with null
    given = {key: value for key, value in cast(RowFields, arguments).items() if value is not None}
    return format_tool_call(cast(str, name), given)
