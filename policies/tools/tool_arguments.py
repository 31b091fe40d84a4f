"""Checks the arguments of a call against the tool's schema. The tool response contains the error.

The only conversion is from an integer to a number. The checked arguments fit a message: integers have
at most 64 bits, numbers are finite, and strings encode as UTF-8.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, cast

JsonSchema = dict[str, Any]

_MAX_SHOWN_CHARACTERS = 80  # characters of a wrong value in an error
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**63 - 1
_TYPE_NAMES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


class ArgumentError(ValueError):
    """Arguments do not fit the schema. The message names the path and the expected type."""


def check_arguments(arguments: Mapping[str, Any], parameters: JsonSchema) -> dict[str, Any]:
    """Return the arguments in the types of `parameters`, the schema of an object. Raises ArgumentError."""
    properties = cast(dict[str, JsonSchema], parameters.get("properties", {}))
    for name in arguments:
        if name not in properties:
            known = ", ".join(map(quote, properties)) or "none"
            raise ArgumentError(f"unknown parameter {quote(name)}; known: {known}")
    for name in cast(list[str], parameters.get("required", [])):
        if name not in arguments:
            raise ArgumentError(f"{quote(name)} must be given, as {_describe_types(properties[name])}")
    return {name: check_value(value, properties[name], name) for name, value in arguments.items()}


def check_value(value: Any, schema: JsonSchema | bool, path: str) -> Any:
    """Return the value in the type of the schema. Raises ArgumentError with `path`.

    The check ignores further features in schemas of MCP servers: keywords such as `$ref` and `oneOf`, and true and
    false as schemas. The server checks these features.
    """
    if isinstance(schema, bool):
        return check_value(value, {}, path)
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        return _check_union(value, schema["anyOf"], path)
    names = _list_types(schema)
    name = _find_type(value, names)
    if name is None:
        raise ArgumentError(f"{quote(path)} must be {_describe_types(schema)}, not {_shorten(value)}")
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        choices = ", ".join(map(quote, schema["enum"]))
        raise ArgumentError(f"{quote(path)} must be one of {choices}, not {_shorten(value)}")
    return _check_content(value, name, schema, path)


def quote(value: object) -> str:
    """Return the JSON text of a value. Half a surrogate pair is escaped, because UTF-8 cannot encode it."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _check_union(value: Any, members: list[JsonSchema | bool], path: str) -> Any:
    schemas = [{} if isinstance(member, bool) else member for member in members]
    errors: list[ArgumentError] = []
    for schema in schemas:
        try:
            return check_value(value, schema, path)
        except ArgumentError as error:
            errors.append(error)
    matching = [one for one in schemas if _find_type(value, _list_types(one)) is not None]
    if len(matching) == 1:  # only this member fits the value's type, and its error is more exact
        raise errors[schemas.index(matching[0])]
    expected = " or ".join(_describe_types(schema) for schema in schemas)
    raise ArgumentError(f"{quote(path)} must be {expected}, not {_shorten(value)}")


def _check_content(value: Any, name: str, schema: JsonSchema, path: str) -> Any:
    match name:
        case "string" if any("\ud800" <= character <= "\udfff" for character in value):
            raise ArgumentError(f"{quote(path)} contains half a surrogate pair")
        case "integer" if not _MIN_INTEGER <= value <= _MAX_INTEGER:
            raise ArgumentError(f"{quote(path)} must be an integer of at most 64 bits")
        case "number":
            return _convert_number(value, path)
        case "array":
            items = schema.get("items", {})
            return [check_value(item, items, f"{path}[{place}]") for place, item in enumerate(value)]
        case "object":
            values = schema.get("additionalProperties", {})
            for key in value:
                _check_content(key, "string", {}, path)
            return {key: check_value(item, values, f"{path}.{key}") for key, item in value.items()}
        case _:
            return value


def _convert_number(value: float, path: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(f"{quote(path)} must be a finite number")
    return number


# ---------------------------------------------------------------- types


def _list_types(schema: JsonSchema) -> list[str]:
    names = schema.get("type", list(_TYPE_NAMES))
    return [names] if isinstance(names, str) else names


def _find_type(value: Any, names: list[str]) -> str | None:
    """Return the name in `names` of the value's type, or None; an integer also has the type of a number."""
    match value:
        case None:
            own = ("null",)
        case bool():
            own = ("boolean",)
        case int():
            own = ("integer", "number")
        case float():
            own = ("number",)
        case str():
            own = ("string",)
        case list():
            own = ("array",)
        case _:
            own = ("object",)
    return next((name for name in own if name in names), None)


def _describe_types(schema: JsonSchema) -> str:
    if "anyOf" in schema:
        return " or ".join(_describe_types(one) for one in schema["anyOf"])
    names = [*_list_types(schema), *(["null"] if schema.get("nullable") else [])]
    return " or ".join(_TYPE_NAMES[name] for name in names) if "type" in schema else "any value"


def _shorten(value: object) -> str:
    text = quote(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
