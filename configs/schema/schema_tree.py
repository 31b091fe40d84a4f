"""Tables of the configuration: their base class, checks, and access to keys by path."""

import difflib
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import replace

# Every number of the configuration has bounds, so that the loader also refuses infinity and NaN.
Count = Annotated[int, Meta(ge=0, le=2**40)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**40)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e9)]
SignedFloat = Annotated[float, Meta(ge=-1e9, le=1e9)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e9)]
LearningRate = Annotated[float, Meta(gt=0, le=10)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
TASK_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
TASK_NAME_RULE = "a string of letters, digits, `_`, `-` and `.` that begins with a letter or a digit"
TaskName = Annotated[str, Meta(pattern=TASK_NAME_PATTERN, max_length=64)]
Port = Annotated[int, Meta(ge=1024, le=65_535)]
# A path in a TOML file is relative to that file, a path in an override to the current folder.
FilePath = Annotated[str, Meta(extra={"is_path": True})]
# "package.module:name", or "file.py:name" with a path as in FilePath (asterism.configs.import_path).
ImportPath = Annotated[str, Meta(extra={"is_import_path": True})]

_MIN_FOREIGN_SIMILARITY = 0.7  # least similarity of a suggested key in another table
# Keys of a configuration file that are not in the schema.
PRESET_KEY = "preset"
STAGES_KEY = "stages"  # tables of stages (asterism.configs.loading.stage_layers)
STAGE_KEY = "stage"  # name of the stage to load
_FILE_KEYS = [PRESET_KEY, STAGES_KEY, STAGE_KEY]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the TOML file; unknown keys are errors."""


S = TypeVar("S", bound=Section)


def replace_keys(section: S, changes: Mapping[str, Any]) -> S:
    """Return the table with other values. The keys of its inner tables are dotted, such as "optimizer.lr"."""
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, dot, rest = key.partition(".")
        (inner.setdefault(name, {}) if dot else values)[rest or name] = value
    tables = {name: replace_keys(getattr(section, name), each) for name, each in inner.items()}
    return replace(section, **values, **tables)


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition` holds; the loader adds the table's path."""
    if not condition:
        raise ValueError(message)


def require_choice(key: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of the records of a table."""
    known = ", ".join(f'"{choice}"' for choice in choices)
    require(value in choices, f'{key} must be one of {known}, got "{value}"')


def find_section(annotation: object) -> type[msgspec.Struct] | None:
    """Return the Struct in `Struct` or `Struct | None`; None for the annotation of a value."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, msgspec.Struct):
            return candidate
    return None


@functools.cache  # msgspec recompiles the annotations on each call
def get_field_types(section: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Return the annotations by key, in the schema's order."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(section)}


def is_table_array(annotation: object) -> bool:
    """Return whether the key is an array of tables, such as [[tasks]]."""
    return get_origin(annotation) is tuple and find_section(annotation) is not None


def find_annotation(root: type[Section], path: Sequence[str]) -> object | None:
    """Return the annotation of the key at `path` below `root`; None for an unknown key.

    A table of an array takes one element of the path: its index or its name.
    """
    annotation: object | None = root
    for key in path:
        if get_origin(annotation) is dict:  # a table with arbitrary keys, such as sglang.environment
            annotation = get_args(annotation)[1]
            continue
        if is_table_array(annotation):
            annotation = find_section(annotation)
            continue
        section = find_section(annotation)
        annotation = get_field_types(section).get(key) if section else None
    return annotation


def format_path(path: Sequence[str]) -> str:
    """Return `tasks[0].weight` for ("tasks", "0", "weight")."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", ".".join(path))


def is_string(annotation: object) -> bool:
    """Return whether the key takes a string, possibly restricted to a few values."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation is str or (get_origin(annotation) is Literal and isinstance(get_args(annotation)[0], str))


def is_path(annotation: object, value: str) -> bool:
    """Return whether the value is, or begins with, the path of a file."""
    return annotation == FilePath or (annotation == ImportPath and value.rpartition(":")[0].endswith(".py"))


def find_nearest_keys(root: type[Section], path: Sequence[str]) -> list[str]:
    """Return the paths of the valid keys that are most similar to `path`; several if tables share the key's name.

    A similar key of the same table takes precedence, then similar keys of its inner tables.
    """
    *parents, name = path
    section = find_section(find_annotation(root, parents))
    siblings = [*get_field_types(section), *([] if parents else _FILE_KEYS)] if section else []
    if close := difflib.get_close_matches(name, siblings, n=1):
        return [format_path([*parents, close[0]])]
    by_name: dict[str, list[str]] = {}
    keys = list(_iter_keys(root))
    within = [key for key in keys if parents and key.startswith(f"{parents[0]}.")]
    if close := difflib.get_close_matches(name, [key.rpartition(".")[2] for key in within], n=1):
        return [key for key in within if key.endswith(f".{close[0]}")]
    for key in keys:
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    nearest = difflib.get_close_matches(name, by_name, n=1, cutoff=_MIN_FOREIGN_SIMILARITY)  # an equal name is nearest
    return by_name[nearest[0]] if nearest else []


def _iter_keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for key, annotation in get_field_types(section).items():
        yield prefix + key
        if (inner := find_section(annotation)) and not is_table_array(annotation):
            yield from _iter_keys(inner, f"{prefix}{key}.")
