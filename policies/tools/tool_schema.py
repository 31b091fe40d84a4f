"""Derives the function-calling schema of a tool from its signature and its Google docstring.

    def lookup(query: str, k: int = 3) -> str:
        \"\"\"Look a query up in the archive.

        Args:
            query: The words to look for.
            k: The number of results.
        \"\"\"

The schema equals that of transformers.utils.get_json_schema without `return`, on which a call does
not depend. Supported types: str, int, float, bool, None, Any, unions, list[T], dict[str, T] and
Literal. The type may contain the description, as in `Annotated[int, "The number of results."]`. A
description may end in choices, as in `The drink. (choices: ["tea", "coffee"])`.
"""

import inspect
import json
import re
from collections.abc import Callable, Container, Hashable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from asterism.policies.tools.tool_arguments import ArgumentError, JsonSchema, check_value

_PLAIN_TYPES: dict[object, JsonSchema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SUPPORTED = "str, int, float, bool, None, Any, unions, list[T], dict[str, T] and Literal"
_SECTION_PATTERN = re.compile(r"(Args|Returns|Raises):")
_PARAMETER_PATTERN = re.compile(r"( *)(\w+)(?: *\([^)]*\))?:(.*)")
_CHOICES_PATTERN = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class ToolSchemaError(ValueError):
    """A function cannot be a tool. The message names the function, the parameter and the remedy."""


class ToolSchema(NamedTuple):
    name: str
    description: str
    parameters: JsonSchema  # {"type": "object", "properties": {...}, "required": [...]}

    def to_json(self) -> str:
        """Return the schema in the function-calling layout of prompts."""
        return json.dumps({"type": "function", "function": self._asdict()})


def build_tool_schema(function: Callable[..., object], hidden: Container[str] = ()) -> ToolSchema:
    """Build the schema without the parameters in `hidden` and a method's `self` or `cls`. Raises ToolSchemaError."""
    name = getattr(function, "__name__", repr(function))
    documentation = inspect.getdoc(function) if inspect.isroutine(function) else None
    if not documentation:
        raise ToolSchemaError(f"{name}: a tool is a function with a Google docstring")
    description, documented = _parse_docstring(documentation)
    try:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ToolSchemaError(f"{name}: its type hints cannot be read: {error}") from error
    properties: dict[str, JsonSchema] = {}
    required: list[str] = []
    for number, parameter in enumerate(signature.parameters.values()):
        is_receiver = number == 0 and parameter.name in ("self", "cls") and parameter.annotation is parameter.empty
        if is_receiver or parameter.name in hidden:
            continue
        try:
            properties[parameter.name] = _build_property(parameter, hints, documented)
        except ToolSchemaError as error:
            raise ToolSchemaError(f"{name}, parameter {parameter.name!r}: {error}") from error
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema: JsonSchema = {"type": "object", "properties": properties}
    return ToolSchema(name, description, {**schema, "required": required} if required else schema)


def _build_property(parameter: inspect.Parameter, hints: dict[str, Any], documented: dict[str, str]) -> JsonSchema:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ToolSchemaError("a call passes arguments by name; *args, **kwargs and positional-only are not supported")
    if parameter.name not in hints:
        raise ToolSchemaError("it has no type annotation")
    hint = hints[parameter.name]
    schema = _build_type_schema(hint)
    description = documented.get(parameter.name) or _find_annotated_description(hint)
    if not description:
        raise ToolSchemaError("it has no description in the docstring's `Args:`, or in Annotated")
    if (choices := _CHOICES_PATTERN.search(description)) is not None:
        schema = {**schema, "enum": _parse_choices(choices.group(1), schema)}
        description = description[: choices.start()].strip()
    return {**schema, "description": description}


def _parse_choices(text: str, schema: JsonSchema) -> list[object]:
    try:
        choices = json.loads(text)
    except ValueError as error:
        raise ToolSchemaError(f"its choices are not a JSON list: {text}") from error
    if not isinstance(choices, list) or not choices:
        raise ToolSchemaError(f"its choices are not a JSON list: {text}")
    stripped = [choice.strip() if isinstance(choice, str) else choice for choice in cast(list[object], choices)]
    for choice in stripped:
        try:
            check_value(choice, schema, "choices")
        except ArgumentError as error:
            raise ToolSchemaError(f"its choices do not fit the parameter's type: {error}") from error
    return stripped


# ---------------------------------------------------------------- types


def _build_type_schema(hint: Any) -> JsonSchema:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None and isinstance(hint, Hashable) and hint in _PLAIN_TYPES:
        return dict(_PLAIN_TYPES[hint])
    if origin is Annotated:
        return _build_type_schema(arguments[0])
    if origin in (Union, UnionType):
        return _build_union_schema(arguments)
    if origin is Literal:
        return _build_literal_schema(arguments)
    if origin is list:
        return {"type": "array", "items": _build_type_schema(arguments[0])} if arguments else {"type": "array"}
    if origin is dict and not arguments:
        return {"type": "object"}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _build_type_schema(arguments[1])}
    raise ToolSchemaError(f"the type {_describe_type(hint)} is not supported; use {_SUPPORTED}")


def _build_union_schema(members: tuple[Any, ...]) -> JsonSchema:
    """Write None as `nullable`, a union of plain types as one list, and any other union as `anyOf`."""
    schemas = [_build_type_schema(member) for member in members if member is not NoneType]
    if len(schemas) == 1:
        union = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        union = {"type": names[0] if len(names) == 1 else names}
    else:
        union = {"anyOf": schemas}
    return {**union, "nullable": True} if NoneType in members else union


def _build_literal_schema(values: tuple[Any, ...]) -> JsonSchema:
    if any(type(value) not in (str, int, float, bool, NoneType) for value in values):
        raise ToolSchemaError("a Literal must consist of strings, numbers, booleans and None")
    names = list(dict.fromkeys(_PLAIN_TYPES[type(value)]["type"] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _describe_type(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)


def _find_annotated_description(hint: Any) -> str | None:
    metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((text.strip() for text in metadata if isinstance(text, str)), None)


# ---------------------------------------------------------------- docstrings


def _parse_docstring(documentation: str) -> tuple[str, dict[str, str]]:
    """Return the description of the function, and those of its parameters."""
    lines = documentation.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if _SECTION_PATTERN.match(line)]
    description = "\n".join(lines[: starts[0]] if starts else lines).strip()
    arguments = next((number for number in starts if lines[number].startswith("Args:")), None)
    return description, {} if arguments is None else _parse_parameters(lines[arguments + 1 :])


def _parse_parameters(lines: list[str]) -> dict[str, str]:
    """Return the entries of the `Args:` section, each joined to one line."""
    entries: dict[str, list[str]] = {}
    name, depth = "", 0  # name of the current entry, and indentation of all entries
    for line in filter(str.strip, lines):
        if not line.startswith(" "):
            break
        entry = _PARAMETER_PATTERN.match(line)
        if entry is not None and (not depth or len(entry.group(1)) <= depth):
            depth, name, line = len(entry.group(1)), entry.group(2), entry.group(3)
        entries.setdefault(name, []).append(line.strip())
    return {name: " ".join(filter(None, parts)) for name, parts in entries.items()}
