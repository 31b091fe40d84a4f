"""Parses an assistant turn: tool calls, final answer, and counts of answer tags."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from policies.dialogue.chat_format import TOOL_DEFINITIONS, TURN_END, ToolName


class ToolCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    tool: ToolName
    code: str
    stdin: str


class MalformedCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call that cannot be run. The model reads `error` as its result."""

    error: str


class AssistantTurn(msgspec.Struct, frozen=True, array_like=True):
    calls: tuple[ToolCall | MalformedCall, ...]
    answer: str | None  # content of the last \boxed{}, preferably inside <answer>
    answer_opens: int
    answer_closes: int


_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BRACE_PATTERN = re.compile(r"(?:\\boxed)?\{|\}")


def parse_assistant_turn(text: str, tools: Sequence[ToolName]) -> AssistantTurn:
    """Parse the text of one assistant turn, with or without its end-of-turn token."""
    text = text.removesuffix(TURN_END)
    calls = tuple(_parse_tool_call(match.group(1).strip(), tools) for match in _CALL_PATTERN.finditer(text))
    section = _extract_last_answer_section(text)
    boxed = extract_last_boxed(section) if section is not None else None
    return AssistantTurn(
        calls=calls,
        answer=boxed if boxed is not None else extract_last_boxed(text),
        answer_opens=text.count("<answer>"),
        answer_closes=text.count("</answer>"),
    )


def _parse_tool_call(text: str, tools: Sequence[ToolName]) -> ToolCall | MalformedCall:
    try:
        call = json.loads(text)
    except ValueError as error:
        return MalformedCall(f"JSONDecodeError: {error}")
    except RecursionError:
        return MalformedCall("JSONDecodeError: nested too deeply")
    if not isinstance(call, dict):
        return MalformedCall('a call must be an object with "name" and "arguments"')
    fields = cast(dict[str, Any], call)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or name not in tools:
        return MalformedCall(f"unknown function {json.dumps(name)}; known: {', '.join(tools)}")
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" must be an object')
    values = cast(dict[str, Any], arguments)
    tool = cast(ToolName, name)
    required = TOOL_DEFINITIONS[tool][2]
    for parameter in required:
        if not isinstance(values.get(parameter), str):
            return MalformedCall(f'"{parameter}" must be given, as a string')
        if not _is_encodable(values[parameter]):
            return MalformedCall(f'"{parameter}" contains half a surrogate pair')
    return ToolCall(tool=tool, code=values["code"], stdin=values["input"] if "input" in required else "")


def _is_encodable(text: str) -> bool:
    """JSON can escape a lone surrogate, which UTF-8 cannot encode."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _extract_last_answer_section(text: str) -> str | None:
    """The text of the last complete answer section. One pass, unlike a lazy pattern."""
    section, end = None, 0
    while (start := text.find("<answer>", end)) >= 0 and (end := text.find("</answer>", start)) >= 0:
        section = text[start + len("<answer>") : end]
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
