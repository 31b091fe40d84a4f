"""The schema as a tree of keys: what lies at a path, and which key was meant by one that does not exist."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from configs.schema import Run

PRESET = "preset"  # a key of the file, not of the schema: it names the values that lie beneath the file's own


def section_of(annotation: object) -> type[msgspec.Struct] | None:
    """The Struct behind `Struct` or `Struct | None`; None for everything that is a value and not a table."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


@functools.cache  # msgspec compiles every annotation anew
def fields_of(section: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Key -> annotation, in the schema's order."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(section)}


def annotation_at(path: Sequence[str]) -> object | None:
    """The annotation of the key at `path`, or None where the schema has no such key."""
    annotation: object | None = Run
    for key in path:
        if get_origin(annotation) is dict:  # of keys of the user's own
            annotation = get_args(annotation)[1]
            continue
        section = section_of(annotation)
        annotation = fields_of(section).get(key) if section else None
    return annotation


def is_text(annotation: object) -> bool:
    """Whether the key takes a string: any, or one of a few."""
    return annotation is str or (get_origin(annotation) is Literal and isinstance(get_args(annotation)[0], str))


def nearest_keys(path: Sequence[str]) -> list[str]:
    """The full paths of the valid keys that `path` may have meant: one as a rule, several where tables share a name.

    A look-alike in the same table comes first, then the keys whose own name is the closest in any table.
    """
    *parents, name = path
    section = section_of(annotation_at(parents))
    siblings = [*fields_of(section), *([] if parents else [PRESET])] if section else []
    if close := difflib.get_close_matches(name, siblings, n=1):
        return [".".join([*parents, close[0]])]
    by_name: dict[str, list[str]] = {}
    for key in _all_keys(Run):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    meant = difflib.get_close_matches(name, by_name, n=1)  # an equal name is the closest of all
    return by_name[meant[0]] if meant else []


def _all_keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for key, annotation in fields_of(section).items():
        yield prefix + key
        if inner := section_of(annotation):
            yield from _all_keys(inner, f"{prefix}{key}.")
