"""Parses an assistant turn: tool calls, final answer, and counts of answer tags and answer blocks."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from asterism.policies.dialogue.boxed_answers import extract_last_boxed
from asterism.policies.dialogue.call_blocks import find_blocks, iter_call_blocks
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.tools.tool_arguments import ArgumentError, check_arguments, quote
from asterism.policies.tools.tool_schema import ToolSchema


class ToolCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call with arguments that fit the tool's schema."""

    tool: str
    arguments: dict[str, Any]  # JSON values by parameter


class MalformedCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call that cannot be run. The model reads `error` as its result."""

    error: str
    is_decoded: bool = True  # false if the content is no object with a name and arguments


class AssistantTurn(msgspec.Struct, frozen=True, array_like=True):
    calls: tuple[ToolCall | MalformedCall, ...]
    answer: str | None  # content of the last box, preferably inside the answer tags; or other text (DialogueFormat)
    answer_opens: int
    answer_closes: int
    answer_spans: int  # number of complete answer blocks
    has_complete_answer: bool  # whether the last block contains the answer


def parse_assistant_turn(text: str, dialogue: DialogueFormat) -> AssistantTurn:
    """Parse the text of one assistant turn, with or without its stop token. Without tools it has no calls."""
    stop = next(filter(text.endswith, dialogue.stop_tokens), "")
    text = text.removesuffix(stop)
    found = find_calls(text, dialogue) if dialogue.tools else []
    calls = tuple(_parse_tool_call(call.strip(), dialogue) for call in found)
    return build_assistant_turn(text, calls, dialogue)


def find_calls(text: str, dialogue: DialogueFormat) -> list[str]:
    """Return the contents of the blocks of calls, without an unclosed block if the dialogue ignores it."""
    blocks = iter_call_blocks(text, dialogue.calls)
    return [block.content for block in blocks if block.is_closed or dialogue.unclosed_call != "ignore"]


def build_assistant_turn(
    text: str, calls: tuple[ToolCall | MalformedCall, ...], dialogue: DialogueFormat
) -> AssistantTurn:
    """Build a turn. `text`: the text that contains the answer."""
    blocks = find_blocks(text, dialogue.answer_open, dialogue.answer_close)
    content = blocks[-1] if blocks else ""
    boxed = extract_last_boxed(content)
    return AssistantTurn(
        calls=calls,
        answer=boxed if boxed is not None else _extract_loose_answer(text, content if blocks else text, dialogue),
        answer_opens=text.count(dialogue.answer_open),
        answer_closes=text.count(dialogue.answer_close),
        answer_spans=len(blocks),
        has_complete_answer=bool(content.strip() if boxed is None and not dialogue.has_boxed_answer else boxed),
    )


def _extract_loose_answer(text: str, content: str, dialogue: DialogueFormat) -> str | None:
    """Return the last box of the turn; without a box, `content` if the task has unboxed answers."""
    boxed = extract_last_boxed(text)
    return content.strip() if boxed is None and not dialogue.has_boxed_answer else boxed


def _parse_tool_call(content: str, dialogue: DialogueFormat) -> ToolCall | MalformedCall:
    try:
        call = dialogue.calls.read_call(content, dialogue.tools)
    except ValueError as error:
        return MalformedCall(str(error), is_decoded=False)
    if not isinstance(call, dict) or not {"name", "arguments"} <= cast(dict[str, Any], call).keys():
        return MalformedCall('a call must be an object with "name" and "arguments"', is_decoded=False)
    fields = cast(dict[str, Any], call)
    if not isinstance(fields["name"], str):
        return MalformedCall('validation error: "name" must be a string', is_decoded=False)
    return check_call(fields["name"], fields["arguments"], dialogue.tools)


def check_call(name: object, arguments: object, tools: Sequence[ToolSchema]) -> ToolCall | MalformedCall:
    tool = next((each for each in tools if each.name == name), None)
    if tool is None:
        known = ", ".join(each.name for each in tools)
        return MalformedCall(f"unknown function {quote(name)}; known: {known}")
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" must be an object')
    try:
        return ToolCall(tool.name, check_arguments(cast(dict[str, Any], arguments), tool.parameters))
    except ArgumentError as error:
        return MalformedCall(str(error))
