"""Parses an assistant turn: tool calls, final answer, and counts of answer tags."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from policies.dialogue.chat_format import DialogueFormat
from policies.tools.tool_arguments import ArgumentError, check_arguments, quote
from policies.tools.tool_schema import ToolSchema


class ToolCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call with arguments that fit the tool's schema."""

    tool: str
    arguments: dict[str, Any]  # JSON values by parameter


class MalformedCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call that cannot be run. The model reads `error` as its result."""

    error: str


class AssistantTurn(msgspec.Struct, frozen=True, array_like=True):
    calls: tuple[ToolCall | MalformedCall, ...]
    answer: str | None  # content of the last \boxed{}, preferably inside the answer tags; or see DialogueFormat
    answer_opens: int
    answer_closes: int


_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_STRING_OR_BRACKET_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
_MAX_NESTING = 64  # of a call's JSON; json.loads has a limit that depends on the caller's stack
_BRACE_PATTERN = re.compile(r"(?:\\boxed)?\{|\}")


def parse_assistant_turn(text: str, dialogue: DialogueFormat) -> AssistantTurn:
    """Parse the text of one assistant turn, with or without its stop token. Without tools it has no calls."""
    stop = next(filter(text.endswith, dialogue.stop_tokens), "")
    text, tools = text.removesuffix(stop), dialogue.tools
    found = _CALL_PATTERN.finditer(text) if tools else ()
    calls = tuple(_parse_tool_call(match.group(1).strip(), tools) for match in found)
    return build_assistant_turn(text, calls, dialogue)


def build_assistant_turn(
    text: str, calls: tuple[ToolCall | MalformedCall, ...], dialogue: DialogueFormat
) -> AssistantTurn:
    """`text`: in which the answer stands."""
    return AssistantTurn(
        calls=calls,
        answer=_extract_answer(text, dialogue),
        answer_opens=text.count(dialogue.answer_open),
        answer_closes=text.count(dialogue.answer_close),
    )


def _extract_answer(text: str, dialogue: DialogueFormat) -> str | None:
    section = _extract_last_answer_section(text, dialogue.answer_open, dialogue.answer_close)
    boxed = extract_last_boxed(section) if section is not None else None
    boxed = boxed if boxed is not None else extract_last_boxed(text)
    if boxed is None and not dialogue.has_boxed_answer:
        return (text if section is None else section).strip()
    return boxed


def _parse_tool_call(text: str, tools: Sequence[ToolSchema]) -> ToolCall | MalformedCall:
    if _is_nested_too_deeply(text):
        return MalformedCall("JSONDecodeError: nested too deeply")
    try:
        call = json.loads(text)
    except ValueError as error:
        return MalformedCall(f"JSONDecodeError: {error}")
    if not isinstance(call, dict):
        return MalformedCall('a call must be an object with "name" and "arguments"')
    fields = cast(dict[str, Any], call)
    return check_call(fields.get("name"), fields.get("arguments"), tools)


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


def _is_nested_too_deeply(text: str) -> bool:
    depth = 0
    for match in _STRING_OR_BRACKET_PATTERN.finditer(text):
        depth += 1 if match.group() in ("[", "{") else -1 if match.group() in ("]", "}") else 0
        if depth > _MAX_NESTING:
            return True
    return False


def _extract_last_answer_section(text: str, opening: str, closing: str) -> str | None:
    """The text of the last complete answer section. One pass, unlike a lazy pattern."""
    section, end = None, 0
    while (start := text.find(opening, end)) >= 0 and (end := text.find(closing, start)) >= 0:
        section = text[start + len(opening) : end]
    return section


def extract_last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{...}`, with balanced inner braces. One pass."""
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []  # (position of the content, whether \\boxed precedes the brace)
    for match in _BRACE_PATTERN.finditer(text):
        if match.group() != "}":
            open_braces.append((match.end(), match.group() != "{"))
        elif open_braces:
            begin, is_boxed = open_braces.pop()
            if is_boxed and (last is None or begin > last[0]):
                last = begin, match.start()
    return None if last is None else text[slice(*last)]
