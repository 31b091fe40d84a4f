"""Dialogues for the cold start, as the token ids that a rollout would have had, with the loss on what was generated.

The pieces are those of policies/dialogue.py, encoded one by one, so that training and generation see the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

from engine.datasets import DatasetError, Row, read_rows
from policies.dialogue import (
    INSTRUCTION,
    PREFILL,
    TURN_END,
    TURN_START,
    Piece,
    TextTokenizer,
    ToolName,
    encode_pieces,
    prompt_pieces,
    tool_call_text,
    tool_turn_pieces,
)


class SftSequence(NamedTuple):
    token_ids: list[int]  # [T]
    loss_mask: list[int]  # [T]; 1 where an assistant would have generated the token, its end of turn included


class _Place(NamedTuple):
    """Where in a file we are, for the error that may have to be raised."""

    path: Path
    row: int
    field: str

    def error(self, problem: str, inner: str = "") -> DatasetError:
        return DatasetError(self.path, problem, row=self.row, field=f"{self.field}.{inner}" if inner else self.field)


class _Message(NamedTuple):
    role: str
    fields: Row
    place: _Place

    def text(self) -> str:
        value = self.fields.get("content")
        if not isinstance(value, str):
            raise self.place.error("a text is wanted here", "content")
        return value


class _Stretch(NamedTuple):
    token_ids: list[int]
    generated: bool


def read_sft(path: Path, tokenizer: TextTokenizer, tools: Sequence[ToolName]) -> list[SftSequence]:
    """One sequence for each row's `messages`. Raises DatasetError naming the file, the row and the field.

    A system message is replaced by the run's own, so that the prompt is the one that the rollouts use.
    """
    return [_sequence(_messages(path, number, row), tokenizer, tools) for number, row in read_rows(path)]


def _messages(path: Path, number: int, row: Row) -> list[_Message]:
    """The row's messages without the system's: user, assistant, then answers of tools or a user and an assistant."""
    here = _Place(path, number, "messages")
    found = row.get("messages")
    if not isinstance(found, list) or not found:
        raise here.error("a list of messages is wanted here")
    messages: list[_Message] = []
    for position, fields in enumerate(cast(list[Any], found)):
        place = here._replace(field=f"messages[{position}]")
        if not isinstance(fields, dict):
            raise place.error("not an object with `role` and `content`")
        message = _Message(str(cast(Row, fields).get("role")), cast(Row, fields), place)
        if message.role == "system" and position == 0:
            continue
        before = messages[-1].role if messages else "nothing"
        if message.role not in _FOLLOWERS[before]:
            raise place.error(f"{message.role!r} cannot follow {before}", "role")
        messages.append(message)
    if not messages or messages[-1].role != "assistant":
        raise here.error("the last message must be the assistant's")
    return messages


_FOLLOWERS = {
    "nothing": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def _sequence(messages: list[_Message], tokenizer: TextTokenizer, tools: Sequence[ToolName]) -> SftSequence:
    token_ids: list[int] = []
    loss_mask: list[int] = []
    for stretch in _stretches(messages, tokenizer, tools):
        token_ids += stretch.token_ids
        loss_mask += [int(stretch.generated)] * len(stretch.token_ids)
    return SftSequence(token_ids, loss_mask)


def _stretches(messages: list[_Message], tokenizer: TextTokenizer, tools: Sequence[ToolName]) -> Iterator[_Stretch]:
    for first, (role, group) in enumerate(groupby(messages, key=lambda message: message.role)):
        together = list(group)
        match role:
            case "assistant":
                text = _assistant_text(together[0], tools)
                yield _Stretch(tokenizer.encode(text, trusted=True), True)
            case "tool":
                pieces = tool_turn_pieces([message.text() for message in together])
                yield _Stretch(encode_pieces(tokenizer, pieces), False)
            case _:
                pieces = _user_pieces(together[0], tools, first=first == 0)
                yield _Stretch(encode_pieces(tokenizer, pieces), False)


def _user_pieces(message: _Message, tools: Sequence[ToolName], *, first: bool) -> list[Piece]:
    """The first user turn carries the system's text and the instruction; a later one is as it is."""
    text = message.text()
    head, _, tail = prompt_pieces("", tools)
    if first:
        return [head, Piece(text.removeprefix(INSTRUCTION), False), tail]
    return [Piece(f"\n{TURN_START}user\n", True), Piece(text, False), tail]


def _assistant_text(message: _Message, tools: Sequence[ToolName]) -> str:
    """What the assistant generated in its turn: the prefilled tag left out, the end of turn included."""
    content = message.text()
    if not content.startswith(PREFILL):
        raise message.place.error(f"must start with {PREFILL}, which the rollouts prefill", "content")
    text = content.removeprefix(PREFILL)
    calls = message.fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise message.place.error("a list of calls is wanted here", "tool_calls")
    for number, call in enumerate(cast(list[Any], calls)):
        place = message.place._replace(field=f"{message.place.field}.tool_calls[{number}]")
        text += ("" if text.endswith("\n") else "\n") + _call_text(call, place, tools)
    return text + TURN_END


def _call_text(call: object, place: _Place, tools: Sequence[ToolName]) -> str:
    """Of `{"name", "arguments"}`, as it is or inside `function`; the arguments an object or its JSON text."""
    fields = cast(Row, call) if isinstance(call, dict) else {}
    function = cast(Row, fields["function"]) if isinstance(fields.get("function"), dict) else fields
    name, arguments = function.get("name"), function.get("arguments")
    if name not in tools:
        raise place.error(f"unknown function {name!r}; this run's tools: {', '.join(tools)}", "name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise place.error(f"not JSON: {error}", "arguments") from error
    if not isinstance(arguments, dict):
        raise place.error("an object, or its JSON text, is wanted here", "arguments")
    given = {key: value for key, value in cast(Row, arguments).items() if value is not None}  # parquet fills up
    return tool_call_text(cast(ToolName, name), given)
