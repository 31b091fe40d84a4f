"""Loading of a RunConfig from a TOML file, `--set` overrides and a preset, and writing it back to
a file.

Layers, later ones taking precedence: the schema's defaults, configs/presets/NAME.toml (`preset =
"NAME"`), the file, the overrides in their order. Every mistake is a ConfigError that names the
layer and the key.
"""

import codecs
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import tomli_w

from configs.atomic_write import write_atomically
from configs.error_messages import ConfigLayer, explain_validation_error, format_value
from configs.errors import UnusableInput
from configs.schema import RunConfig
from configs.schema_tree import (
    PRESET_KEY,
    find_annotation,
    find_nearest_keys,
    find_section,
    format_path,
    is_path,
    is_string,
    is_table_array,
)

_NO_FILE = Path("the defaults")
_TASK_SECTIONS = ("dialogue", "reward")  # of a task: the run's, with the task's keys
PRESETS_FOLDER = Path(__file__).parent / "presets"


class ConfigError(UnusableInput):
    """An unusable configuration: names file or flag, the key's full path, and the remedy."""


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Without a file, the overrides apply to the schema's defaults. Raises ConfigError."""
    layers = [*map(_read_layer, [path] if path else []), *map(_parse_override, overrides)]
    if preset := _pop_preset(layers):
        layers.insert(0, preset)
    for layer in layers:
        _check_keys(layer.source, layer.table)
        _resolve_paths(layer.table, layer.folder)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer.table, layer.source)
    _fill_task_sections(merged)
    try:
        return msgspec.convert(merged, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(explain_validation_error(str(error), merged, layers, path or _NO_FILE)) from None


def load_with_overrides(path: Path, overrides: Sequence[str], sections: Sequence[str]) -> RunConfig:
    """A finished run's configuration with overrides in `sections`. Raises ConfigError for any other change."""
    run = load_run(path, overrides)
    for difference in list_differences(load_run(path), run):
        key = difference.partition(":")[0]
        if key.partition(".")[0] not in sections:
            allowed = " and ".join(f"{section}.*" for section in sections)
            raise ConfigError(f"--set {key}: cannot be changed for a finished run; only {allowed} can")
    return run


def write_resolved(run: RunConfig, path: Path) -> None:
    """Write every key, so that later defaults do not apply. Raises OSError, DiskError."""
    write_atomically(path, tomli_w.dumps(_drop_none(msgspec.to_builtins(run))).encode())


def list_differences(a: RunConfig, b: RunConfig) -> list[str]:
    """One line per key that differs, such as `learner.lr: 0.0003 -> 0.0001`."""
    return _diff_tables(msgspec.to_builtins(a), msgspec.to_builtins(b), "")


def list_resume_conflicts(before: RunConfig, after: RunConfig) -> list[str]:
    """Differences that prevent `--resume`: all except those of `cluster`, `health` and `metrics`."""
    changed = msgspec.structs.replace(before, cluster=after.cluster, health=after.health, metrics=after.metrics)
    return list_differences(changed, after)


# ---------------------------------------------------------------- reading the layers


def _read_layer(path: Path) -> ConfigLayer:
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


def _parse_override(override: str) -> ConfigLayer:
    source = f"--set {override}"
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"{source}: expected key.path=value, such as --set learner.lr=1e-4")
    table: Any = _parse_value(
        text.strip(), expects_string=keys == [PRESET_KEY] or is_string(find_annotation(RunConfig, keys))
    )
    for key in reversed(keys):
        table = {key: table}
    return ConfigLayer(source, cast("dict[str, Any]", table))


def _parse_value(text: str, *, expects_string: bool) -> object:
    """The value as TOML; text that is not TOML is a string, without a second pair of quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"value"}:  # a line break in the text starts another key
        return text
    value = parsed["value"]
    return text if expects_string and not isinstance(value, str) else value  # name=2024 is a string


def _pop_preset(layers: Sequence[ConfigLayer]) -> ConfigLayer | None:
    """Remove `preset` from the layers; the last layer that sets it counts."""
    presets = [(layer.source, layer.table.pop(PRESET_KEY)) for layer in layers if PRESET_KEY in layer.table]
    if not presets:
        return None
    source, name = presets[-1]
    known = sorted(path.stem for path in PRESETS_FOLDER.glob("*.toml"))
    if name not in known:
        raise ConfigError(f"{source}: unknown preset {format_value(name)}; known are: {', '.join(known)}")
    return _read_layer(PRESETS_FOLDER / f"{name}.toml")


def _check_keys(source: str, table: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
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
        _check_keys(source, cast("dict[str, Any]", value), here)


def _resolve_paths(table: dict[str, Any], folder: Path, path: tuple[str, ...] = ()) -> None:
    """Make relative paths absolute. Empty paths and those in the run's folder stay as they are."""
    for key, value in table.items():
        annotation = find_annotation(RunConfig, (*path, key))
        if isinstance(value, dict):
            _resolve_paths(cast("dict[str, Any]", value), folder, (*path, key))
        elif is_table_array(annotation):
            for index, element in enumerate(value):
                _resolve_paths(element, folder, (*path, key, str(index)))
        elif isinstance(value, str) and is_path(annotation, value) and value and not value.startswith("$RUN"):
            table[key] = os.path.normpath(Path.cwd() / folder / Path(value).expanduser())


def _suggest_keys(path: Sequence[str]) -> str:
    nearest = " or ".join(f"`{key}`" for key in find_nearest_keys(RunConfig, path))
    return f"; did you mean {nearest}?" if nearest else ""


def _merge(
    base: Mapping[str, Any], override: Mapping[str, Any], source: str, path: tuple[str, ...] = ()
) -> dict[str, Any]:
    merged = dict(base)
    for key, value in override.items():
        before, here = merged.get(key), (*path, key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merge(cast("dict[str, Any]", before), cast("dict[str, Any]", value), source, here)
        elif isinstance(value, dict) and is_table_array(find_annotation(RunConfig, here)):
            value = _merge_by_name(".".join(here), before or [], cast("dict[str, Any]", value), source)
        merged[key] = value
    return merged


def _merge_by_name(
    key: str, tables: Sequence[Mapping[str, Any]], overrides: Mapping[str, Any], source: str
) -> list[Mapping[str, Any]]:
    """Such as `--set tasks.math.weight=2` for the table of [[tasks]] with the name "math"."""
    names = [table.get("name") for table in tables]
    if unknown := [name for name in overrides if name not in names]:
        known = ", ".join(map(str, names)) or "none"
        raise ConfigError(f'{source}: [[{key}]] has no table with the name "{unknown[0]}"; known: {known}')
    return [_merge(table, overrides.get(str(name), {}), source) for name, table in zip(names, tables, strict=True)]


def _fill_task_sections(merged: dict[str, Any]) -> None:
    """With the run's keys. A task that brings its own tools has no Python tool unless the configuration names one."""
    tasks = merged.get("tasks")
    for task in tasks if isinstance(tasks, list) else ():
        for section in _TASK_SECTIONS:
            task[section] = _merge(merged.get(section, {}), task.get(section, {}), section)
        if task.get("import"):
            task["dialogue"].setdefault("tools", [])


# ---------------------------------------------------------------- comparing and writing


def _drop_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null; an absent key means None."""
    return {key: _drop_none_within(value) for key, value in table.items() if value is not None}


def _drop_none_within(value: Any) -> Any:
    if isinstance(value, dict):
        return _drop_none(cast("dict[str, Any]", value))
    return [_drop_none_within(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _diff_tables(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    for key in {**a, **b}:  # keys of sglang.environment are arbitrary, so they may differ
        before, after = a.get(key), b.get(key)
        before, after = _index_tables(before), _index_tables(after)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += _diff_tables(cast("dict[str, Any]", before), cast("dict[str, Any]", after), f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {format_value(before)} -> {format_value(after)}")
    return lines


def _index_tables(value: Any) -> Any:
    """An array of tables as a table by name."""
    is_array = isinstance(value, (list, tuple)) and value and all(isinstance(each, dict) for each in value)
    return {each.get("name", str(number)): each for number, each in enumerate(value)} if is_array else value
