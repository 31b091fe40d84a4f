"""Reads ToolACE's layout: calls as `[name(argument=value), ...]`, and functions as a JSON list in the system text."""

import ast
import json
import re
import warnings
from itertools import pairwise
from typing import Any, cast

from asterism.engine.data.data_files import RowFields
from asterism.engine.data.dialogue_messages import DialogueMessage, RowDialogue

# A quote begins a string only at the start of a value: the name of a function can contain an apostrophe.
_STRING = r"""(?:\A|(?<=[=(\[{,:]))\s*(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
_TOKEN = re.compile(rf"{_STRING}|.", re.DOTALL)
_JSON_NAME = re.compile(rf"{_STRING}|\b(?:true|false|null)\b", re.DOTALL)
_PYTHON_NAMES = {"true": "True", "false": "False", "null": "None"}
_FUNCTIONS = re.compile(r"\[\s*\{\s*\"")
_CALL_SYNTAX = re.compile(r"[^.\n]*\[\w+\(.*")  # matches from the start of the sentence to the line's end
_INTRODUCTION = re.compile(r"[^.\n]*(?:list of functions[^.\n]*\.?|:)\Z")


def convert_call_lists(dialogue: RowDialogue) -> tuple[RowDialogue, list[RowFields]]:
    """Return the dialogue with `tool_calls` in place of written calls, and the functions of its system text.

    The system text keeps the text before the functions, without sentences about functions and about the syntax of
    calls. Raises DatasetError for a message that begins like a call of a function but is not a list of calls.
    """
    functions, system = _split_system(dialogue.system)
    names = [str(each["name"]) for each in functions]
    return RowDialogue([_convert_message(each, names) for each in dialogue.messages], system), functions


def parse_call_list(text: str) -> list[RowFields]:
    """Return `{"name", "arguments"}` of each call. Raises ValueError for another text."""
    text = text.strip()
    if not text.startswith("[") or not text.endswith("]"):
        raise ValueError("a list begins with [ and ends with ]")
    return [_parse_call(part) for part in _split(text[1:-1])]


def _convert_message(message: DialogueMessage, names: list[str]) -> DialogueMessage:
    text = message.fields.get("content")
    if message.role != "assistant" or not isinstance(text, str):
        return message
    try:
        calls = parse_call_list(text)
    except ValueError as error:
        if any(text.lstrip().startswith(f"[{name}") for name in names):
            raise message.location.build_error(f"not a list of calls: {error}", "content") from error
        return message
    return message._replace(fields=message.fields | {"content": None, "tool_calls": calls})


def _split_system(system: str) -> tuple[list[RowFields], str]:
    """Return the functions and the text without them. A text without a JSON list of functions stays whole."""
    start = _FUNCTIONS.search(system)
    try:
        found: Any = json.JSONDecoder().raw_decode(system, start.start())[0] if start else []
    except (ValueError, RecursionError):
        found = []
    functions = [cast(RowFields, each) for each in found if isinstance(each, dict) and "name" in each]
    if start is None or not functions or len(functions) < len(found):
        return [], system
    text = _INTRODUCTION.sub("", system[: start.start()].rstrip())
    return functions, _CALL_SYNTAX.sub("", text).strip()


def _parse_call(text: str) -> RowFields:
    """Parse a call. The last brackets contain the arguments, because the name can contain brackets, too."""
    brackets = _find_outer(text, "(")
    if not text.endswith(")") or not brackets or not brackets[-1]:
        raise ValueError(f"expected name(argument=value): {text:.80}")
    arguments: RowFields = {}
    for argument in filter(None, _split(text[brackets[-1] + 1 : -1])):
        name, equals, value = argument.partition("=")
        if not equals or name.strip() in arguments:
            raise ValueError(f"expected one argument=value of each name: {argument:.80}")
        arguments[name.strip()] = _parse_value(value.strip())
    return {"name": text[: brackets[-1]].strip(), "arguments": arguments}


def _parse_value(text: str) -> Any:
    """Parse a literal of JSON or Python as a value of JSON."""
    try:
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            literal = _JSON_NAME.sub(lambda found: _PYTHON_NAMES.get(found[0], found[0]), text)
            with warnings.catch_warnings(action="ignore"):  # Python warns about unknown escapes
                value = ast.literal_eval(literal)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"not a literal of JSON or Python: {text:.80}") from None


def _split(text: str) -> list[str]:
    """Split the text at commas outside of strings and brackets."""
    cuts = [-1, *_find_outer(text, ","), len(text)]
    return [text[start + 1 : end].strip() for start, end in pairwise(cuts)]


def _find_outer(text: str, character: str) -> list[int]:
    """Return positions of the character outside of strings and brackets. Raises ValueError for a missing bracket."""
    positions: list[int] = []
    depth = 0
    for token in _TOKEN.finditer(text):
        if token[0] in ")]}":
            depth -= 1
        if depth == 0 and token[0] == character:
            positions.append(token.start())
        if token[0] in "([{":
            depth += 1
        if depth < 0:
            break
    if depth:
        raise ValueError("a bracket is missing")
    return positions
