"""Reads the messages of cold-start rows: OpenAI's `messages` and ShareGPT's `conversations` (docs/data.md).

Both layouts become messages with the roles user, assistant and tool. The calls of an assistant are in `tool_calls`, or
in its text as the model writes them.
"""

import json
import re
from typing import Any, NamedTuple, cast

from asterism.engine.data.data_files import DatasetError, DatasetRow, RowDefect, RowFields
from asterism.engine.data.reasoning_tags import THINK, BrokenTags, join_reasoning, require_pairs, split_reasoning
from asterism.policies.dialogue.chat_format import CALL_FORMATS
from asterism.policies.dialogue.json_calls import JSON_CALLS
from asterism.policies.dialogue.tool_call_format import ToolCallFormat

BROKEN_TAGS = "broken tags of reasoning"
DIALOGUE_COLUMNS = ("messages", "conversations", "task", "system", "tools")
_CALL_ROLES = ("function_call", "tool_call")  # roles of separate messages in ShareGPT
_RESULT_ROLES = ("observation", "function", "ipython", "function_response", "tool_response")
_ROLES = {
    **{"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system"},
    **dict.fromkeys(_CALL_ROLES, "assistant"),
    **dict.fromkeys(_RESULT_ROLES, "tool"),
}
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_ALLOWED_NEXT_ROLES = {
    "nothing": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_OPENING_TAG = re.compile(r"\s*<(\w+)>\s*")
_RESPONSE = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)


class DatasetLocation(NamedTuple):
    """A field of a row in a data file, for error messages."""

    row: DatasetRow
    field: str

    def build_error(self, problem: str, inner: str = "") -> DatasetError:
        field = f"{self.field}.{inner}" if inner else self.field
        return DatasetError(self.row.path, problem, row=self.row.number, field=field)

    def build_defect(self, kind: str, problem: str) -> RowDefect:
        return RowDefect(kind, self.row.path, problem, row=self.row.number, field=self.field)


class DialogueMessage(NamedTuple):
    role: str
    fields: RowFields
    location: DatasetLocation

    def get_text(self) -> str:
        """Return the text, which is empty for an assistant that only calls tools. Raises DatasetError."""
        value = self.fields.get("content")
        if value is None and self.role == "assistant" and self.fields.get("tool_calls"):
            return ""
        if isinstance(value, list):
            parts = [_get_text_part(part) for part in cast(list[Any], value)]
            if None not in parts and (self.role != "tool" or _are_typed_parts(cast(list[Any], value))):
                return "".join(cast(list[str], parts))
        if self.role == "tool" and isinstance(value, dict | list):
            return json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str):
            raise self.location.build_error("expected a string", "content")
        return value

    def get_results(self) -> list[str]:
        """Return the results of a tool: the texts of its <tool_response> blocks, or its text. Raises DatasetError."""
        text = self.get_text()
        blocks = _RESPONSE.findall(text)
        return blocks if blocks and not _RESPONSE.sub("", text) else [text]

    @property
    def belongs_to_call(self) -> bool:
        """Return whether the message calls a tool or is a result."""
        content = self.fields.get("content")
        text = content if isinstance(content, str) and self.role == "assistant" else ""
        in_text = any(calls.opening in text for calls in CALL_FORMATS.values())
        return self.role == "tool" or in_text or bool(self.fields.get("tool_calls"))

    def get_turn_text(self, prefill: str, calls: ToolCallFormat = JSON_CALLS) -> str:
        """Return the text of an assistant's turn, beginning with the prefill of the rollouts.

        Reasoning in a separate field or in <think> gets the tag of the prefill; without reasoning, the closing tag
        follows the prefill. Raises DatasetError for a content that cannot follow the prefill.
        """
        content, reasoning = self.get_text(), self._find_reasoning()
        opening = _OPENING_TAG.fullmatch(prefill)
        try:
            if opening is not None:
                text = join_reasoning(content, reasoning, prefill, opening[1], calls)
                require_pairs(text, opening[1], THINK, prefix=opening[1], calls=calls)
                return text
            text = content if reasoning is None else f"<think>{reasoning}</think>\n{content}"
            require_pairs(text, THINK, calls=calls)
        except BrokenTags as error:
            raise self.location.build_defect(BROKEN_TAGS, str(error)) from error
        if not text.startswith(prefill):
            raise self.location.build_error(f"must start with {prefill}, the prefill of the rollouts", "content")
        return text

    def split_reasoning(self) -> tuple[str, str]:
        """Return the reasoning of a separate field or of <think>, or "", and the rest. Raises DatasetError."""
        content, reasoning = self.get_text(), self._find_reasoning()
        reasoning, text = split_reasoning(content) if reasoning is None else (reasoning, content)
        try:
            require_pairs(f"<{THINK}>{reasoning}</{THINK}>{text}", THINK)
        except BrokenTags as error:
            raise self.location.build_defect(BROKEN_TAGS, str(error)) from error
        return reasoning, text

    def _find_reasoning(self) -> str | None:
        """Return the reasoning of a separate field. An empty field counts as absent: the content can have reasoning."""
        values = (self.fields.get(name) for name in _REASONING_FIELDS)
        return next((value for value in values if isinstance(value, str) and value), None)


class RowDialogue(NamedTuple):
    """The messages of a row, without a system message."""

    messages: list[DialogueMessage]
    system: str  # text of the system message or of the column `system`, or empty

    @property
    def has_calls(self) -> bool:
        return any(message.belongs_to_call for message in self.messages)


def parse_dialogue(row: DatasetRow) -> RowDialogue:
    """Parse the messages of a row. Raises DatasetError with the field."""
    column = row.fields.get("system")
    system = column if isinstance(column, str) else ""
    name = "messages" if row.fields.get("messages") is not None else "conversations"
    here = DatasetLocation(row, name if name in row.fields else "messages")
    value = row.fields.get(name)
    if not isinstance(value, list) or not value:
        raise here.build_error("expected a list of messages")
    messages: list[DialogueMessage] = []
    for position, fields in enumerate(cast(list[Any], value)):
        location = DatasetLocation(row, f"{here.field}[{position}]")
        if not isinstance(fields, dict):
            raise location.build_error("expected an object with `role` and `content`")
        message = _convert_message(cast(RowFields, fields), location)
        if message.role == "system" and position == 0:
            system = message.get_text() or system
            continue
        before = messages[-1] if messages else None
        if before is not None and message.fields.get("continues_turn") and before.role == "assistant":
            messages[-1] = _join_calls(before, message)
            continue
        if message.role not in _ALLOWED_NEXT_ROLES[before.role if before else "nothing"]:
            follows = before.role if before else "nothing"
            raise location.build_error(f"{message.role!r} cannot follow {follows}", "role")
        messages.append(message)
    if not messages or messages[-1].role != "assistant":
        raise here.build_error("the last message must be the assistant's")
    return RowDialogue(messages, system)


def _convert_message(fields: RowFields, location: DatasetLocation) -> DialogueMessage:
    given = str(fields.get("role") if fields.get("role") is not None else fields.get("from"))
    converted = dict(fields)
    if "value" in fields and "content" not in fields:
        converted["content"] = fields["value"]
    if given in _CALL_ROLES:
        converted |= {"tool_calls": _parse_calls(converted.get("content"), location), "content": None}
        converted["continues_turn"] = True
    elif fields.get("function_call") is not None:  # OpenAI's older form of tool_calls
        converted["tool_calls"] = [fields["function_call"]]
    return DialogueMessage(_ROLES.get(given, given), converted, location)


def _join_calls(turn: DialogueMessage, following: DialogueMessage) -> DialogueMessage:
    """Return the assistant's turn with the calls of the next message. Raises DatasetError."""
    earlier = turn.fields.get("tool_calls") or []
    if not isinstance(earlier, list):
        raise turn.location.build_error("expected a list of calls", "tool_calls")
    return turn._replace(
        fields=turn.fields | {"tool_calls": [*cast(list[Any], earlier), *following.fields["tool_calls"]]}
    )


def _parse_calls(value: object, location: DatasetLocation) -> list[Any]:
    """Parse one call or several calls in JSON text."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise location.build_error(f"not JSON: {error}", "value") from error
    return cast(list[Any], calls) if isinstance(calls, list) else [calls]


def _are_typed_parts(value: list[Any]) -> bool:
    """Return whether all parts have the type text. Any other list is a tool's result as JSON."""
    return bool(value) and all(isinstance(part, dict) and cast(RowFields, part).get("type") == "text" for part in value)


def _get_text_part(part: object) -> str | None:
    text = cast(RowFields, part).get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else None
