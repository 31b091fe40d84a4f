"""Encodes a table as TOML, because the standard library only reads TOML."""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def encode_table(table: Mapping[str, Any]) -> str:
    """Return the document. Values are strings, booleans, numbers, dates, arrays and tables; others raise TypeError."""
    return "\n".join(_list_lines(table, ())).lstrip("\n") + "\n"


def encode_value(value: object) -> str:
    """Return a value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):  # str(inf) is TOML's inf
        return str(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(encode_value, cast('Sequence[object]', value)))}]"
    if isinstance(value, dict):
        items = cast("dict[str, object]", value).items()
        return "{ " + ", ".join(f"{_encode_key(key)} = {encode_value(each)}" for key, each in items) + " }"
    raise TypeError(f"TOML has no {type(value).__name__}: {value!r}")


def _list_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the keys of a table before its tables, which begin with a line of their own."""
    for key, value in table.items():
        if not isinstance(value, dict) and not _is_table_array(value):
            yield f"{_encode_key(key)} = {encode_value(value)}"
    for key, value in table.items():
        inner = (*path, key)
        name = ".".join(map(_encode_key, inner))
        if isinstance(value, dict):
            yield from ("", f"[{name}]")
            yield from _list_lines(cast("dict[str, Any]", value), inner)
        elif _is_table_array(value):
            for each in value:
                yield from ("", f"[[{name}]]")
                yield from _list_lines(each, inner)


def _is_table_array(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(each, dict) for each in value)


def _encode_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else encode_value(key)
