"""Formats error messages for a configuration: layer, key, expected value and actual value."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import (
    TASK_NAME_PATTERN,
    TASK_NAME_RULE,
    Section,
    find_annotation,
    find_section,
    is_table_array,
)
from asterism.configs.toml_text import encode_value

_TOML_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "a table",
    "array": "an array",
}
_MISSING = re.compile(r"Object missing required field `(\w+)`")


class ConfigLayer(NamedTuple):
    source: str  # path of the file, or the flag as typed
    table: dict[str, Any]
    folder: Path = Path()  # the file's folder; relative paths of a flag belong to the current folder


def explain_validation_error(message: str, merged: Mapping[str, Any], layers: Sequence[ConfigLayer], file: Path) -> str:
    """Translate msgspec's message into TOML's terms and add the value and the layer that set the value.

    >>> # "Expected `int`, got `str` - at `$.rl.steps`"
    >>> # "configs/tiny.toml: `rl.steps` must be an integer, got \"many\""
    """
    keys = _split_path(_partition(message)[1])
    source = "" if _MISSING.match(message) else _find_sources(keys, layers)
    return f"{source or file}: {explain_problem(message, merged)}"


def explain_problem(message: str, table: Mapping[str, Any], root: type[Section] = RunConfig) -> str:
    """Translate msgspec's message about a table of type `root`, without the source of the value."""
    problem, key_path = _partition(message)
    if missing := _MISSING.match(problem):
        return f"the key `{f'{key_path}.' if key_path else ''}{missing[1]}` is missing"
    if problem.startswith(("Expected", "Invalid enum value")):
        expected = _describe_expected(problem, find_annotation(root, _split_path(key_path)))
        return f"`{key_path}` must be {expected}, got {_describe_actual(problem, key_path, table)}"
    return f"`{key_path}`: {problem}" if key_path else problem


def prefix_key(key: str, message: str) -> str:
    """Return the message after the key; unchanged if it begins with another key of the same table.

    A file name, such as data.jsonl for the key data.train, is no key.
    """
    table, named = key.rpartition(".")[0], message.partition(":")[0]
    is_key = table and named.startswith(f"{table}.") and find_annotation(RunConfig, named.split(".")) is not None
    return message if is_key else f"{key}: {message}"


def _partition(message: str) -> tuple[str, str]:
    """Return the problem and the path of the key; the path is empty for the whole table."""
    problem, _, location = message.partition(" - at `$")
    return problem, location.strip("`").removeprefix(".")


def _split_path(key_path: str) -> list[str]:
    """Return the keys, with the indices of tables in arrays, but without the indices of other values."""
    keys: list[str] = []
    for key, index in re.findall(r"([^.\[\]]+)|\[(.*?)\]", key_path):
        if key or is_table_array(find_annotation(RunConfig, keys)):
            keys.append(key or index)
    return keys


def _find_sources(keys: Sequence[str], layers: Sequence[ConfigLayer]) -> str:
    """Return the last layer that set the key; for a table, return all layers that set any key of the table."""
    sources = [layer.source for layer in layers if _contains_key(layer.table, keys)]
    is_table = find_section(find_annotation(RunConfig, keys)) is not None
    return " with ".join(sources if is_table else sources[-1:])


def _contains_key(table: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if isinstance(table, list) and key.isdigit() and int(key) < len(cast("list[Any]", table)):
            table = cast("list[Any]", table)[int(key)]
            continue
        if not isinstance(table, dict) or key not in table:
            return False
        table = cast("dict[str, Any]", table)[key]
    return True


def _describe_expected(problem: str, annotation: object) -> str:
    if problem.startswith("Invalid enum value"):
        return "one of " + ", ".join(format_value(choice) for choice in _list_choices(annotation))
    if TASK_NAME_PATTERN in problem:
        return TASK_NAME_RULE
    wanted = re.match(r"Expected `([^`]*)`(.*?)(, got .*)?$", problem)
    if wanted is None:
        return problem.removeprefix("Expected ").partition(", got ")[0]
    types = [_TOML_TYPE_NAMES.get(name, name) for name in wanted[1].split(" | ") if name != "null"]
    return " or ".join(types) + wanted[2]


def _list_choices(annotation: object) -> list[Any]:
    """Return the values of a Literal, or of a Literal that is the element of a tuple."""
    arguments = [argument for argument in get_args(annotation) if argument is not ...]
    return [choice for argument in arguments for choice in (_list_choices(argument) or [argument])]


def _describe_actual(problem: str, key_path: str, merged: Mapping[str, Any]) -> str:
    """Describe the value, or only its type if msgspec does not name the key, as in sglang.environment."""
    kind = re.search(r", got `(\w+)`$", problem)
    if kind and key_path.endswith("[...]"):
        return _TOML_TYPE_NAMES.get(kind[1], kind[1])
    return format_value(_find_value(key_path, merged))


def _find_value(key_path: str, table: Any) -> object:
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key_path):
        table = table[int(index)] if index else table[key]
    return table


def format_value(value: object) -> str:
    """Return the value in TOML syntax."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(item) for item in cast("list[object]", value)) + "]"
    return encode_value(value)
