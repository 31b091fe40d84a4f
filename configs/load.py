"""From a TOML file, `--set` overrides and a preset to a `Run`, and back to a file.

Layers, each over the one before: the schema's defaults, configs/presets/NAME.toml (`preset = "NAME"`), the file, the
overrides in their order. Whatever is wrong with any of them is a ConfigError that names the layer and the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import tomli_w

from configs.complaints import Layer, explain, show
from configs.disk import write_whole
from configs.errors import UnusableInput
from configs.keys import PRESET, annotation_at, is_text, nearest_keys, section_of
from configs.schema import Run

_NO_FILE = Path("the defaults")
PRESETS = Path(__file__).parent / "presets"


class ConfigError(UnusableInput):
    """The configuration cannot be used. `str(error)` names the file or the flag, the key's full path, and the remedy."""


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> Run:
    """Without a file, the overrides stand on the schema's defaults alone. Raises ConfigError."""
    layers = [*map(_read, [path] if path else []), *map(_parse_override, overrides)]
    if preset := _preset_of(layers):
        layers.insert(0, preset)
    for layer in layers:
        _check_keys(layer.source, layer.table)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer.table)
    try:
        return msgspec.convert(merged, Run)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), merged, layers, path or _NO_FILE)) from None


def load_resolved(path: Path) -> Run:
    """What `write_resolved` wrote. Raises ConfigError."""
    return load_run(path)


def write_resolved(run: Run, path: Path) -> None:
    """Every key with the value that is in force, so that later defaults change nothing. Raises OSError, DiskRefused."""
    write_whole(path, tomli_w.dumps(_without_none(msgspec.to_builtins(run))).encode())


def differences(a: Run, b: Run) -> list[str]:
    """One line `learner.lr: 0.0003 -> 0.0001` for each key that differs; empty if the runs are configured alike."""
    return _differences(msgspec.to_builtins(a), msgspec.to_builtins(b), "")


def obstacles(before: Run, after: Run) -> list[str]:
    """The differences with which a run cannot go on: all but those of the cluster, which may be another one."""
    return differences(msgspec.structs.replace(before, cluster=after.cluster), after)


# ---------------------------------------------------------------- reading the layers


def _read(path: Path) -> Layer:
    try:
        return Layer(str(path), tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from None


def _parse_override(override: str) -> Layer:
    source = f"--set {override}"
    dotted, equals, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"{source}: expected key.path=value, such as --set learner.lr=1e-4")
    table: Any = _parse_value(text.strip(), wants_text=keys == [PRESET] or is_text(annotation_at(keys)))
    for key in reversed(keys):
        table = {key: table}
    return Layer(source, cast("dict[str, Any]", table))


def _parse_value(text: str, *, wants_text: bool) -> object:
    """TOML where it is TOML, else the bare string: nobody wants to quote for the shell and for TOML at once."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(parsed) != {"value"}:  # a line break in the text began another key
        return text
    value = parsed["value"]
    return text if wants_text and not isinstance(value, str) else value  # name=2024 is a name


def _preset_of(layers: Sequence[Layer]) -> Layer | None:
    """Takes `preset` out of the layers; the last one that names it counts."""
    named = [(layer.source, layer.table.pop(PRESET)) for layer in layers if PRESET in layer.table]
    if not named:
        return None
    source, name = named[-1]
    known = sorted(path.stem for path in PRESETS.glob("*.toml"))
    if name not in known:
        raise ConfigError(f"{source}: unknown preset {show(name)}; known are: {', '.join(known)}")
    return _read(PRESETS / f"{name}.toml")


def _check_keys(source: str, table: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
    """Every key exists, and tables are where the schema has tables; otherwise merging would hide what is wrong."""
    for key, value in table.items():
        here = (*path, key)
        annotation = annotation_at(here)
        if annotation is None:
            raise ConfigError(f"{source}: unknown key `{'.'.join(here)}`{_did_you_mean(here)}")
        if section_of(annotation) is None:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{source}: `{'.'.join(here)}` must be a table, got {show(value)}")
        _check_keys(source, cast("dict[str, Any]", value), here)


def _did_you_mean(path: Sequence[str]) -> str:
    nearest = " or ".join(f"`{key}`" for key in nearest_keys(path))
    return f"; did you mean {nearest}?" if nearest else ""


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], cast("dict[str, Any]", value)) if both_tables else value
    return merged


# ---------------------------------------------------------------- comparing and writing


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: a key that is absent says the same."""
    present = {key: value for key, value in table.items() if value is not None}
    return {key: _without_none(value) if isinstance(value, dict) else value for key, value in present.items()}


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    for key in {**a, **b}:  # a table of the user's own, such as sglang.environment, may have others
        before, after = a.get(key), b.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += _differences(cast("dict[str, Any]", before), cast("dict[str, Any]", after), f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {show(before)} -> {show(after)}")
    return lines
