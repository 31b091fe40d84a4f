"""Reads the layers of a configuration, the file and `--set` overrides, checks them against the schema, and merges them.

Every mistake is a ConfigError that names the layer and the key.
"""

import codecs
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.configs.loading.error_messages import ConfigLayer, format_value
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import (
    PRESET_KEY,
    STAGE_KEY,
    STAGES_KEY,
    find_annotation,
    find_nearest_keys,
    find_section,
    format_path,
    is_path,
    is_string,
    is_table_array,
)


class ConfigError(UnusableInput):
    """A configuration is unusable; the message names file or flag, the key's full path, and the remedy."""


def read_layer(path: Path) -> ConfigLayer:
    check_file(path)  # checks the file against a run folder's manifest
    try:
        content = path.read_bytes()
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError(f"{path}: is UTF-16 text; save it as UTF-8")
        return ConfigLayer(str(path), tomllib.loads(content.decode("utf-8-sig")), path.parent)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def parse_override(override: str) -> ConfigLayer:
    source = f"--set {override}"
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"{source}: expected key.path=value, such as --set learner.optimizer.lr=1e-4")
    run_keys = keys[2:] if keys[0] == STAGES_KEY else keys
    expects_string = keys in ([PRESET_KEY], [STAGE_KEY]) or is_string(find_annotation(RunConfig, run_keys))
    table: Any = _parse_value(text.strip(), expects_string=expects_string)
    for key in reversed(keys):
        table = {key: table}
    return ConfigLayer(source, cast("dict[str, Any]", table))


def _parse_value(text: str, *, expects_string: bool) -> object:
    """Parse a value as TOML; text that is not TOML is a string, without a second pair of quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"value"}:  # a line break in the text starts another key
        return text
    value = parsed["value"]
    return text if expects_string and not isinstance(value, str) else value  # name=2024 is a string


def check_keys(source: str, table: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Check that all keys exist and tables match the schema; merging would hide mistakes."""
    for key, value in table.items():
        here = (*path, key)
        annotation = find_annotation(RunConfig, here)
        if annotation is None:
            raise ConfigError(f"{source}: unknown key `{format_path(here)}`{_suggest_keys(here)}")
        if find_section(annotation) is None:
            continue
        if is_table_array(annotation) and isinstance(value, list):
            value = {str(index): element for index, element in enumerate(cast("list[Any]", value))}
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: `{format_path(here)}` must be a table, got {format_value(value)}")
        check_keys(source, cast("dict[str, Any]", value), here)


def resolve_paths(table: dict[str, Any], folder: Path, source: str, path: tuple[str, ...] = ()) -> None:
    """Make relative paths absolute. Empty paths and those in the run's folder stay as they are."""
    for key, value in table.items():
        annotation = find_annotation(RunConfig, (*path, key))
        if isinstance(value, dict):
            resolve_paths(cast("dict[str, Any]", value), folder, source, (*path, key))
        elif is_table_array(annotation):
            for index, element in enumerate(value):
                resolve_paths(element, folder, source, (*path, key, str(index)))
        elif isinstance(value, str) and is_path(annotation, value) and value and not value.startswith("$RUN"):
            table[key] = os.path.normpath(Path.cwd() / folder / _expand_home(value, source, (*path, key)))


def _expand_home(value: str, source: str, path: tuple[str, ...]) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{source}: `{format_path(path)}` must begin with the folder of a user that exists, got {format_value(value)}"
        ) from None


def _suggest_keys(path: Sequence[str]) -> str:
    nearest = " or ".join(f"`{key}`" for key in find_nearest_keys(RunConfig, path))
    return f"; did you mean {nearest}?" if nearest else ""


def merge(
    base: Mapping[str, Any], override: Mapping[str, Any], source: str, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    merged = dict(base)
    for key, value in override.items():
        before, here = merged.get(key), (*path, key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = merge(cast("dict[str, Any]", before), cast("dict[str, Any]", value), source, here)
        elif isinstance(value, dict) and is_table_array(find_annotation(RunConfig, here)):
            value = merge_by_name(".".join(here), before or [], cast("dict[str, Any]", value), source)
        merged[key] = value
    return merged


def merge_by_name(
    key: str, tables: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], source: str
) -> list[Mapping[str, Any]]:
    """Merge overrides such as `--set tasks.math.weight=2` into the table of [[tasks]] with the name "math"."""
    names = [table.get("name") for table in tables]
    if unknown := [name for name in overrides if name not in names]:
        known = ", ".join(map(str, names)) or "none"
        raise ConfigError(f'{source}: [[{key}]] has no table with the name "{unknown[0]}"; known: {known}')
    return [merge(table, overrides.get(str(name), {}), source) for name, table in zip(names, tables, strict=True)]
