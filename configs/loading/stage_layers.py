"""Splits [[stages]] (docs/stages.md): each table has keys of StageConfig, and keys of a run that differ in this stage.

    [[stages]]
    name = "12k"
    rl.steps = 85
    dialogue.response_tokens = 12_288

A stage is a layer of the configuration between the file and the overrides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from asterism.configs.loading.config_layers import ConfigError, check_keys, merge_by_name, resolve_paths
from asterism.configs.loading.error_messages import ConfigLayer, explain_problem, format_value
from asterism.configs.schema.schema_tree import PRESET_KEY, STAGE_KEY, STAGES_KEY, Section, TaskName, get_field_types


class StageConfig(Section, frozen=True, kw_only=True):
    """The keys of a stage that are not keys of a run."""

    name: TaskName  # name of the stage's folder in the run's folder
    # Training problems. unsolved: without problems that the previous stage solved in all rollouts of their last group.
    problems: Literal["all", "unsolved"] = "all"
    optimizer: Literal["keep", "reset"] = "keep"  # whether to keep the optimizer's moments of the previous stage
    problem_order: Literal["continue", "restart"] = "continue"  # go on after the previous stage, or start over


# Keys that all stages share, and keys of the file.
_WHOLE_RUN = ("name", "runs_folder", "prepare", "model", "sft", "cluster", PRESET_KEY, STAGE_KEY, STAGES_KEY)
_OWN_KEYS = tuple(get_field_types(StageConfig))


class StageLayer(NamedTuple):
    options: StageConfig
    layer: ConfigLayer  # keys of the run


def pop_stages(layers: Sequence[ConfigLayer]) -> list[StageLayer]:
    """Remove `stages` from the layers. Overrides name a stage: `--set stages.12k.rl.steps=5`. Raises ConfigError."""
    tables: list[Mapping[str, Any]] = []
    source = ""
    for layer in layers:
        value = layer.table.pop(STAGES_KEY, None)
        if value is None:
            continue
        if isinstance(value, dict):
            overrides = cast("dict[str, Any]", value)
            for table in overrides.values():
                _check_run_keys(f"{layer.source}: `{STAGES_KEY}`", table, layer)
            tables = merge_by_name(STAGES_KEY, tables, overrides, layer.source)
            continue
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in cast("list[Any]", value)):
            raise ConfigError(f"{layer.source}: `{STAGES_KEY}` must be an array of tables, got {format_value(value)}")
        tables, source = cast("list[Mapping[str, Any]]", value), layer.source
        for index, table in enumerate(tables):
            _check_run_keys(f"{source}: `{STAGES_KEY}[{index}]`", table, layer)
    stages = [_split(table, f"{source}: `{STAGES_KEY}[{index}]`") for index, table in enumerate(tables)]
    names = [stage.options.name for stage in stages]
    if repeated := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(f'{source}: `{STAGES_KEY}`: the name "{repeated}" is used twice')
    if stages and stages[0].options.problems == "unsolved":
        raise ConfigError(f'{source}: `{STAGES_KEY}[0].problems`: "unsolved" needs a stage before')
    for stage in stages:
        _check_data(stage)
    return stages


def choose_stage(stages: Sequence[StageLayer], layers: Sequence[ConfigLayer]) -> StageLayer | None:
    """Remove `stage` from the layers; return the stage with this name, or the first one. Raises ConfigError."""
    chosen = [(layer.source, layer.table.pop(STAGE_KEY)) for layer in layers if STAGE_KEY in layer.table]
    if not chosen:
        return stages[0] if stages else None
    source, name = chosen[-1]
    for stage in stages:
        if stage.options.name == name:
            return stage
    known = ", ".join(stage.options.name for stage in stages) or "none; the configuration has no [[stages]]"
    raise ConfigError(f"{source}: unknown stage {format_value(name)}; known are: {known}")


def _check_run_keys(source: str, table: Mapping[str, Any], layer: ConfigLayer) -> None:
    """Check the keys of the run, and make their paths absolute."""
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: expected keys of a stage, got {format_value(table)}")
    for key, value in table.items():
        if key == "name" and "." in str(value):
            raise ConfigError(
                f"{source}: name = {format_value(value)}: a dot separates the keys of --set; use another name"
            )
        if key in _OWN_KEYS:
            continue
        if key in _WHOLE_RUN:
            raise ConfigError(f"{source}: a stage cannot have the key `{key}`; set it outside [[{STAGES_KEY}]]")
        run_keys = {key: value}
        check_keys(source, run_keys)
        resolve_paths(run_keys, layer.folder, layer.source)


def _check_data(stage: StageLayer) -> None:
    """Raise ConfigError for training data with problems = "unsolved": the previous stage determines them."""
    table = stage.layer.table
    tasks: Any = table.get("tasks", {})
    named: dict[Any, Any] = tasks if isinstance(tasks, dict) else dict(enumerate(tasks))
    keys = [f"tasks.{name}.data" for name, task in named.items() if "data" in task]
    keys += ["data.train"] if "train" in table.get("data", {}) else []
    if keys and stage.options.problems == "unsolved":
        raise ConfigError(
            f'{stage.layer.source}: `{keys[0]}`: problems = "unsolved" takes the data of the stage before; remove this '
            f"key (other keys of a task can be set in [{STAGES_KEY}.tasks.NAME])"
        )


def _split(table: Mapping[str, Any], source: str) -> StageLayer:
    own = {key: value for key, value in table.items() if key in _OWN_KEYS}
    try:
        options = msgspec.convert(own, StageConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain_problem(str(error), own, StageConfig)}") from None
    run_keys = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    return StageLayer(options, ConfigLayer(f"{source} ({options.name})", run_keys))
