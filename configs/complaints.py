"""What is wrong with a configuration, in the words of who wrote it: which layer, which key, what it takes, what it got."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import tomli_w

from configs.keys import annotation_at, section_of

_TOML_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "object": "a table",
    "array": "an array",
}


class Layer(NamedTuple):
    source: str  # the file's path, or the flag as it was typed
    table: dict[str, Any]


def explain(message: str, merged: Mapping[str, Any], layers: Sequence[Layer], file: Path) -> str:
    """msgspec's message in TOML's words, with who set the value and what it is.

    >>> # "Expected `int`, got `str` - at `$.rl.steps`"
    >>> # "configs/tiny.toml: `rl.steps` must be an integer, got \"many\""
    """
    complaint, _, location = message.partition(" - at `$")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", complaint):
        return f"{file}: the key `{missing[1]}` is missing"
    spelled = location.strip("`").removeprefix(".")
    keys = re.sub(r"\[.*?\]", "", spelled).split(".") if spelled else []
    where = f"`{spelled}`"
    source = _who_set(keys, layers) or str(file)
    if complaint.startswith(("Expected", "Invalid enum value")):
        return f"{source}: {where} must be {_expected(complaint, keys)}, got {_got(complaint, spelled, merged)}"
    return f"{source}: {where}: {complaint}" if spelled else f"{source}: {complaint}"


def _who_set(keys: Sequence[str], layers: Sequence[Layer]) -> str:
    """The last layer that set the key; where a whole table is at fault, all that have a part in it."""
    sources = [layer.source for layer in layers if _reaches(layer.table, keys)]
    is_table = section_of(annotation_at(keys)) is not None
    return " with ".join(sources if is_table else sources[-1:])


def _reaches(table: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(table, dict) or key not in table:
            return False
        table = cast("dict[str, Any]", table)[key]
    return True


def _expected(complaint: str, keys: Sequence[str]) -> str:
    if complaint.startswith("Invalid enum value"):
        return "one of " + ", ".join(show(choice) for choice in _choices(annotation_at(keys)))
    wanted = re.match(r"Expected `([^`]*)`(.*?)(, got .*)?$", complaint)
    if wanted is None:
        return complaint.removeprefix("Expected ").partition(", got ")[0]
    words = [_TOML_WORDS.get(word, word) for word in wanted[1].split(" | ") if word != "null"]
    return " or ".join(words) + wanted[2]


def _choices(annotation: object) -> list[Any]:
    """The values of a Literal, also where it is the element of a tuple."""
    arguments = [argument for argument in get_args(annotation) if argument is not ...]
    return [choice for argument in arguments for choice in (_choices(argument) or [argument])]


def _got(complaint: str, spelled: str, merged: Mapping[str, Any]) -> str:
    """The value; only what it is where the key is one of the user's own, which msgspec does not name."""
    kind = re.search(r", got `(\w+)`$", complaint)
    if kind and spelled.endswith("[...]"):
        return _TOML_WORDS.get(kind[1], kind[1])
    return show(_value_at(spelled, merged))


def _value_at(spelled: str, table: Any) -> object:
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", spelled):
        table = table[int(index)] if index else table[key]
    return table


def show(value: object) -> str:
    """The value as TOML writes it."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(show(item) for item in cast("list[object]", value)) + "]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
