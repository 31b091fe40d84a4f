"""Loads a RunConfig from a TOML file, `--set` overrides and a preset, and writes it back to a file.

Later layers take precedence: the schema's defaults, configs/presets/NAME.toml (`preset = "NAME"`), the file, a table of
its [[stages]], the overrides in their order. Every mistake is a ConfigError that names the layer and the key.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from asterism.configs.atomic_write import write_atomically
from asterism.configs.loading.config_layers import (
    ConfigError,
    check_keys,
    merge,
    parse_override,
    read_layer,
    resolve_paths,
)
from asterism.configs.loading.error_messages import ConfigLayer, explain_validation_error, format_value
from asterism.configs.loading.renamed_keys import find_renamings, migrate
from asterism.configs.loading.stage_layers import StageConfig, choose_stage, pop_stages
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import PRESET_KEY, STAGE_KEY
from asterism.configs.toml_text import encode_table

_NO_FILE = Path("the defaults")
_TASK_SECTIONS = ("dialogue", "reward")  # sections of a task: the run's sections, with the task's keys
PRESETS_FOLDER = Path(__file__).parent / "presets"


def load_run(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a configuration. Without a file, the overrides apply to the schema's defaults. With [[stages]], the key
    `stage` names the stage to load, by default the first one. Raises ConfigError."""
    layers = _read_layers(path, overrides)
    if stage := choose_stage(pop_stages(layers), layers):
        layers.insert(1 if path else 0, stage.layer)
    if preset := _pop_preset(layers):
        layers.insert(0, preset)
    for layer in layers:
        check_keys(layer.source, layer.table)
        resolve_paths(layer.table, layer.folder, layer.source)
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer.table, layer.source)
    _fill_task_sections(merged)
    _fill_evaluation_sampling(merged)
    try:
        return msgspec.convert(merged, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(explain_validation_error(str(error), merged, layers, path or _NO_FILE)) from None


def _read_layers(path: Path | None, overrides: Sequence[str]) -> list[ConfigLayer]:
    layers = [*([read_layer(path)] if path else []), *map(parse_override, overrides)]
    for layer in layers:
        _replace_former_names(layer, path)
    return layers


def _replace_former_names(layer: ConfigLayer, path: Path | None) -> None:
    """Replace former names in a run folder's configuration; raise ConfigError for former names in other layers."""
    renamings = find_renamings(layer.table)
    if path is not None and layer.source == str(path) and RunFolder(path.parent).events.is_dir():
        migrate(layer.table)
    elif renamings:
        old, new = renamings[0]
        remedy = (
            "" if layer.source.startswith("--") else f"; `asterism config --migrate {layer.source}` rewrites the file"
        )
        raise ConfigError(f"{layer.source}: `{old}` is named `{new}` now{remedy}")


def load_stages(path: Path, overrides: Sequence[str] = ()) -> list[tuple[StageConfig, RunConfig]]:
    """Return each stage with its configuration; none without [[stages]]. Raises ConfigError."""
    stages = pop_stages(_read_layers(path, overrides))
    return [(stage.options, load_run(path, [*overrides, f"{STAGE_KEY}={stage.options.name}"])) for stage in stages]


def expand_paths(run: RunConfig, folder: RunFolder) -> RunConfig:
    """Replace `$RUN` by `folder` in all paths, so that another run can use the files."""
    return msgspec.convert(_expand_texts(msgspec.to_builtins(run), folder), RunConfig)


def _expand_texts(value: Any, folder: RunFolder) -> Any:
    if isinstance(value, dict):
        return {key: _expand_texts(each, folder) for key, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_expand_texts(each, folder) for each in cast("list[Any]", value)]
    return str(folder.expand_path(value)) if isinstance(value, str) and "$RUN" in value else value


def load_with_overrides(path: Path, overrides: Sequence[str], sections: Sequence[str]) -> RunConfig:
    """Load a finished run's configuration with overrides in `sections`. Raises ConfigError for any other change."""
    run = load_run(path, overrides)
    for difference in list_differences(load_run(path), run):
        key = difference.partition(":")[0]
        if key.partition(".")[0] not in sections:
            allowed = " and ".join(f"{section}.*" for section in sections)
            raise ConfigError(f"--set {key}: cannot be changed for a finished run; only {allowed} can")
    return run


def list_preset_changes(path: Path, overrides: Sequence[str], run: RunConfig) -> list[str]:
    """List the preset's keys to which the run gives another value, such as `roc.enabled: false -> true`."""
    layers = [read_layer(path), *map(parse_override, overrides)]
    if (preset := _pop_preset(layers)) is None:
        return []
    values = msgspec.json.decode(msgspec.json.encode(run))  # JSON has lists for tuples, as TOML has
    return _diff_tables(preset.table, _select(values, preset.table), "")


def _select(table: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a table that has the keys of another table."""
    return {key: _select(table[key], each) if isinstance(each, dict) else table[key] for key, each in keys.items()}


def write_resolved(run: RunConfig, path: Path) -> None:
    """Write every key, so that later defaults do not apply. Only the user can read the file, which can contain secrets.

    Raises OSError, DiskError.
    """
    content = encode_table(_drop_none(msgspec.to_builtins(run))).encode()
    write_atomically(path, content, is_private=True)


def list_differences(a: RunConfig, b: RunConfig) -> list[str]:
    """List the keys that differ, one per line, such as `learner.optimizer.lr: 0.0003 -> 0.0001`."""
    return _diff_tables(msgspec.to_builtins(a), msgspec.to_builtins(b), "")


def list_resume_conflicts(before: RunConfig, after: RunConfig) -> list[str]:
    """List differences that prevent `--resume`: all except those of `cluster`, `health` and `metrics`."""
    changed = msgspec.structs.replace(before, cluster=after.cluster, health=after.health, metrics=after.metrics)
    return list_differences(changed, after)


# ---------------------------------------------------------------- reading the layers


def _pop_preset(layers: Sequence[ConfigLayer]) -> ConfigLayer | None:
    """Remove `preset` from the layers; the last layer with a preset takes precedence."""
    presets = [(layer.source, layer.table.pop(PRESET_KEY)) for layer in layers if PRESET_KEY in layer.table]
    if not presets:
        return None
    source, name = presets[-1]
    known = sorted(path.stem for path in PRESETS_FOLDER.glob("*.toml"))
    if name not in known:
        raise ConfigError(f"{source}: unknown preset {format_value(name)}; known are: {', '.join(known)}")
    return read_layer(PRESETS_FOLDER / f"{name}.toml")


def _fill_task_sections(merged: dict[str, Any]) -> None:
    """Fill a task's sections with the run's keys. A task with tools has no Python tool unless `tools` names one."""
    tasks = merged.get("tasks")
    for task in tasks if isinstance(tasks, list) else ():
        for section in _TASK_SECTIONS:
            task[section] = merge(merged.get(section, {}), task.get(section, {}), section)
        if task.get("import"):
            task["dialogue"].setdefault("tools", [])


def _fill_evaluation_sampling(merged: dict[str, Any]) -> None:
    """Complete [evaluation.sampling], if it is set, with the keys of [sampling]."""
    evaluation = merged.get("evaluation")
    if isinstance(evaluation, dict) and "sampling" in evaluation:
        evaluation["sampling"] = merge(merged.get("sampling", {}), evaluation["sampling"], "evaluation.sampling")


# ---------------------------------------------------------------- comparing and writing


def _drop_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys with None: TOML has no null, and an absent key means None."""
    return {key: _drop_none_within(value) for key, value in table.items() if value is not None}


def _drop_none_within(value: Any) -> Any:
    if isinstance(value, dict):
        return _drop_none(cast("dict[str, Any]", value))
    return [_drop_none_within(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value


def _diff_tables(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> list[str]:
    lines: list[str] = []
    for key in {**a, **b}:  # keys of sglang.environment are arbitrary, and can exist in one table only
        before, after = a.get(key), b.get(key)
        is_array = isinstance(before, (list, tuple))
        before, after = _index_tables(before), _index_tables(after)
        if isinstance(before, dict) and isinstance(after, dict):
            names, other_names = list(cast("dict[str, Any]", before)), list(cast("dict[str, Any]", after))
            if is_array and names != other_names and set(names) == set(other_names):  # files of a mixture are numbered
                lines.append(f"{prefix}{key}: order {', '.join(names)} -> {', '.join(other_names)}")
            lines += _diff_tables(cast("dict[str, Any]", before), cast("dict[str, Any]", after), f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {format_value(before)} -> {format_value(after)}")
    return lines


def _index_tables(value: Any) -> Any:
    """Return an array of tables as a table by name. Other values stay unchanged."""
    is_array = isinstance(value, (list, tuple)) and value and all(isinstance(each, dict) for each in value)
    return {each.get("name", str(number)): each for number, each in enumerate(value)} if is_array else value
