"""Formats any state or message as indented text, with token arrays reduced to their lengths."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, cast

import msgspec

_MAX_ENTRIES = 40  # shown entries of one container
_FOUR_BYTE_ARRAYS = ("token_ids", "prompt_ids", "logprobs", "versions")  # fields with four bytes per element
_MAX_INLINE_ITEMS = 16  # length up to which bytes and sequences of numbers are printed in full
_INDENT = "  "

NamedValue = tuple[str, object]


def pretty_format(value: object, label: str = "") -> str:
    return "\n".join(_format_lines(label, value, 0, set()))


def _format_lines(label: str, value: object, depth: int, shown: set[int]) -> Iterator[str]:
    start = _INDENT * depth + (f"{label} " if label else "")
    text = _format_inline(label, value)
    if text is None and not isinstance(value, msgspec.Struct | Mapping | list | tuple | Set):
        if id(value) in shown:  # objects may refer to each other
            text = f"{type(value).__name__} (above)"
        shown.add(id(value))
    if text is not None:
        yield start + text
        return
    entries = list(_list_entries(value))
    yield start + _format_title(value, len(entries))
    for name, entry in entries[:_MAX_ENTRIES]:
        yield from _format_lines(name, entry, depth + 1, shown)
    if len(entries) > _MAX_ENTRIES:
        yield _INDENT * (depth + 1) + f"... {len(entries) - _MAX_ENTRIES:,} more"


def _format_inline(label: str, value: object) -> str | None:
    """Return the value in one line, or None for a value with entries."""
    if isinstance(value, bytes):
        if label in _FOUR_BYTE_ARRAYS:
            return f"{len(value) // 4:,} tokens"
        if label == "loss_mask":
            return f"{len(value):,} tokens"
        return value.hex() if len(value) <= _MAX_INLINE_ITEMS else f"{len(value):,} bytes"
    if isinstance(value, Mapping | list | tuple | Set):
        items = cast("Iterable[object]", value)
        if not value:
            return "none"
        plain = not isinstance(value, Mapping) and not hasattr(value, "_fields")
        if plain and all(isinstance(item, int | float) for item in items):
            return ", ".join(map(repr, items)) if len(value) <= _MAX_INLINE_ITEMS else f"{len(value):,} numbers"
        return None
    if hasattr(value, "shape"):  # a numpy array
        return f"{cast(Any, value).size:,} numbers"
    return None if isinstance(value, msgspec.Struct) or _list_attributes(value) else repr(value)


def _format_title(value: object, num_entries: int) -> str:
    if isinstance(value, Mapping | list | Set) or type(value) is tuple:
        return f"({num_entries:,})"
    return type(value).__name__


def _list_entries(value: object) -> Iterator[NamedValue]:
    if isinstance(value, msgspec.Struct):
        yield from ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in cast("Mapping[Any, object]", value).items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(cast(Any, value)._fields, cast("tuple[object, ...]", value), strict=True)
    elif isinstance(value, list | tuple | Set):
        yield from (("-", part) for part in cast("Iterable[object]", value))
    else:
        yield from ((name.lstrip("_"), part) for name, part in _list_attributes(value))


def _list_attributes(value: object) -> list[NamedValue]:
    return [(name, part) for name, part in getattr(value, "__dict__", {}).items() if not callable(part)]
