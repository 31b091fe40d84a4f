"""Any state or message as indented text: no token arrays, but how many tokens they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, cast

import msgspec

_MOST = 40  # entries of one container; how many more there are is said
_FOUR_BYTES = ("token_ids", "prompt_ids", "logprobs", "versions")  # an element
_SHORT = 16  # bytes, or numbers in a row, that are shown as they are
_INDENT = "  "

Entry = tuple[str, object]


def readable(value: object, label: str = "") -> str:
    return "\n".join(_lines(label, value, 0, set()))


def _lines(label: str, value: object, depth: int, shown: set[int]) -> Iterator[str]:
    start = _INDENT * depth + (f"{label} " if label else "")
    text = _in_a_line(label, value)
    if text is None and not isinstance(value, msgspec.Struct | Mapping | list | tuple | Set):
        if id(value) in shown:  # what refers to each other is told once
            text = f"{type(value).__name__} (above)"
        shown.add(id(value))
    if text is not None:
        yield start + text
        return
    entries = list(_entries(value))
    yield start + _title(value, len(entries))
    for name, entry in entries[:_MOST]:
        yield from _lines(name, entry, depth + 1, shown)
    if len(entries) > _MOST:
        yield _INDENT * (depth + 1) + f"... {len(entries) - _MOST:,} more"


def _in_a_line(label: str, value: object) -> str | None:
    """None if it has parts."""
    if isinstance(value, bytes):
        if label in _FOUR_BYTES:
            return f"{len(value) // 4:,} tokens"
        if label == "loss_mask":
            return f"{len(value):,} tokens"
        return value.hex() if len(value) <= _SHORT else f"{len(value):,} bytes"
    if isinstance(value, Mapping | list | tuple | Set):
        items = cast("Iterable[object]", value)
        if not value:
            return "none"
        plain = not isinstance(value, Mapping) and not hasattr(value, "_fields")
        if plain and all(isinstance(item, int | float) for item in items):
            return ", ".join(map(repr, items)) if len(value) <= _SHORT else f"{len(value):,} numbers"
        return None
    if hasattr(value, "shape"):  # an array of numpy's
        return f"{cast(Any, value).size:,} numbers"
    return None if isinstance(value, msgspec.Struct) or _attributes(value) else repr(value)


def _title(value: object, entries: int) -> str:
    if isinstance(value, Mapping | list | Set) or type(value) is tuple:
        return f"({entries:,})"
    return type(value).__name__


def _entries(value: object) -> Iterator[Entry]:
    if isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in cast("Mapping[Any, object]", value).items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(cast(Any, value)._fields, cast("tuple[object, ...]", value), strict=True)
    elif isinstance(value, list | tuple | Set):
        yield from (("-", part) for part in cast("Iterable[object]", value))
    else:
        yield from ((name.lstrip("_"), part) for name, part in _attributes(value))


def _attributes(value: object) -> list[Entry]:
    return [(name, part) for name, part in getattr(value, "__dict__", {}).items() if not callable(part)]
