"""Maps the former names of keys and import paths to the present ones.

A configuration with a former name is refused, and the error names the new one; `asterism config --migrate FILE`
rewrites the file. In the configuration of a run folder, the loader replaces former names.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, cast

from asterism.configs.import_path import find_present_path

_LEARNER_TABLES = {
    "optimizer": ("lr", "final_lr_fraction", "warmup_steps", "betas", "weight_decay", "max_grad_norm"),
    "loss": (
        *("clip_low", "clip_high", "clip_dual", "old_logprobs", "correction", "correction_low", "correction_high"),
        *("log_ratio_limit", "mismatch_limit", "kl_coef", "kl_estimator", "entropy_coef"),
    ),
    "memory": ("micro_batch_tokens", "activation_checkpointing", "offload", "reduce_gradients"),
    "checkpoints": ("export_every", "export_dtype"),
}
RENAMED_KEYS: dict[str, str] = {
    **{f"learner.{key}": f"learner.{table}.{key}" for table, keys in _LEARNER_TABLES.items() for key in keys},
    "learner.loss": "learner.loss.function",
    "learner.loss_mean": "learner.loss.mean",
    **{f"learner.lora_{key}": f"learner.lora.{key}" for key in ("rank", "alpha", "targets", "publish")},
    "learner.checkpoint_every": "learner.checkpoints.every",
    "learner.checkpoint_minutes": "learner.checkpoints.minutes",
    "learner.keep_checkpoints": "learner.checkpoints.keep",
    **{f"evaluation.{key}": f"evaluation.sampling.{key}" for key in ("temperature", "top_p", "top_k")},
}
# Former values that mean "as in [sampling]"; today an absent key means this.
_DROPPED_VALUES = {"evaluation.temperature": 0, "evaluation.top_p": 1, "evaluation.top_k": 0}
_DEMO = 'import = "asterism.tasks.tiny.prepare:TinyDemo"'  # program with the keys of the former table [tiny]
_DEMO_LINE = re.compile(r"^([ \t]*\[?[ \t]*)tiny(?=[\s.=\]])", re.MULTILINE)
_HEADER = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]+")
_ENTRY = re.compile(r"\s*(?P<key>[\w.-]+)\s*=\s*(?P<value>.*\n?)")
_INLINE_ENTRY = re.compile(r"(?P<begin>[{,]\s*)(?P<key>[\w.]+)(?P<value>\s*=\s*[^,{}]*?)(?=\s*[,{}])")
_STAGES = "stages"


class Renaming(NamedTuple):
    old: str  # a key, or an import path
    new: str


def find_renamings(table: Mapping[str, Any]) -> list[Renaming]:
    """Return the former names in a configuration, with the present ones."""
    roots = _list_roots(table)
    keys = [Renaming(old, new) for root in roots for old, new in RENAMED_KEYS.items() if _find_parent(root, old)]
    keys += [Renaming("tiny", "prepare.parameters")] if "tiny" in table else []
    return keys + [renaming for _, _, renaming in _iter_import_paths(table)]


def migrate(table: MutableMapping[str, Any]) -> None:
    """Replace the former names in a parsed configuration."""
    if "tiny" in table:
        table["prepare"] = {**tomllib.loads(_DEMO), "parameters": table.pop("tiny")}
    for root in _list_roots(table):
        parents = {old: parent for old in RENAMED_KEYS if (parent := _find_parent(root, old)) is not None}
        # Remove all values first: `learner.loss` is a table now, in which other former keys are set.
        values = {old: parent.pop(old.rpartition(".")[2]) for old, parent in parents.items()}
        for old, value in values.items():
            if old not in _DROPPED_VALUES or value != _DROPPED_VALUES[old]:
                _set(root, RENAMED_KEYS[old], value)
    for parent, key, renaming in list(_iter_import_paths(table)):
        parent[key] = renaming.new


def migrate_text(text: str) -> str:
    """Replace the former names in a TOML file, line by line, so that comments stay. Raises ValueError if a former name
    remains."""
    lines, section = list[str](), ""
    for line in _move_demo(text).splitlines(keepends=True):
        if header := _HEADER.match(line):
            section = re.sub(rf"^{_STAGES}\.?", "", header[1])
        lines.append(_rename_keys(line, section))
    migrated, expected = "".join(lines), tomllib.loads(text)
    for _, _, (old, new) in _iter_import_paths(expected):
        migrated = re.sub(rf"""(["']){re.escape(old)}\1""", rf"\1{new}\1", migrated)
    migrate(expected)
    if tomllib.loads(migrated) != expected:
        raise ValueError("a former name is at a place where this command does not rewrite it")
    return migrated


def _move_demo(text: str) -> str:
    """Return the text with the former table [tiny] as parameters of the demo's program."""
    if not (first := _DEMO_LINE.search(text)):
        return text
    program = f"[prepare]\n{_DEMO}\n\n" if "[" in first[1] else f"prepare.{_DEMO}\n"
    if "\r\n" in text:
        program = program.replace("\n", "\r\n")
    return text[: first.start()] + program + _DEMO_LINE.sub(r"\1prepare.parameters", text[first.start() :])


def _rename_keys(line: str, section: str) -> str:
    """Return the line with present keys; only the comment of a key with a dropped value."""
    if not (entry := _ENTRY.match(line)):
        return line
    prefix = f"{section}." if section else ""
    key = f"{prefix}{entry['key']}"
    if entry["value"].startswith("{"):
        renamed = _INLINE_ENTRY.sub(lambda found: found["begin"] + _rename_inline(found, f"{key}."), entry["value"])
        return line[: entry.start("value")] + re.sub(r",\s*\0|\0,?\s*", "", renamed)
    if _is_dropped(key, entry["value"]):
        return line[line.find("#") :] if "#" in line else ""
    return line[: entry.start("key")] + _rename(entry["key"], prefix) + line[entry.end("key") :]


def _rename_inline(entry: re.Match[str], prefix: str) -> str:
    """Return the entry with its present key; "\\0", which TOML forbids, for a dropped value."""
    is_dropped = _is_dropped(prefix + entry["key"], entry["value"].replace("=", "", 1))
    return "\0" if is_dropped else _rename(entry["key"], prefix) + entry["value"]


def _is_dropped(key: str, value: str) -> bool:
    return key in _DROPPED_VALUES and tomllib.loads(f"value = {value}")["value"] == _DROPPED_VALUES[key]


def _rename(key: str, prefix: str) -> str:
    return RENAMED_KEYS.get(prefix + key, prefix + key).removeprefix(prefix)


def _set(root: MutableMapping[str, Any], key: str, value: object) -> None:
    *parents, name = key.split(".")
    table = root
    for each in parents:
        table = table.setdefault(each, {})
    table[name] = value


def _find_parent(root: Mapping[str, Any], key: str) -> MutableMapping[str, Any] | None:
    """Return the table with the former key, or None. `learner.loss` is also the name of a present table."""
    *parents, name = key.split(".")
    table: Any = root
    for each in parents:
        table = table.get(each) if isinstance(table, Mapping) else None
    if not isinstance(table, MutableMapping) or name not in table or isinstance(table[name], Mapping):
        return None
    return cast("MutableMapping[str, Any]", table)


def _list_roots(table: Mapping[str, Any]) -> list[Any]:
    """List the tables with keys of a run: the whole one, and those of stages, which --set has by name."""
    stages = table.get(_STAGES)
    stages = stages.values() if isinstance(stages, Mapping) else stages if isinstance(stages, list) else ()
    return [table, *(each for each in cast("Iterable[Any]", stages) if isinstance(each, Mapping))]


def _iter_import_paths(table: Any) -> Iterator[tuple[Any, Any, Renaming]]:
    """Yield container and key of each former import path of this project."""
    items = table.items() if isinstance(table, Mapping) else enumerate(table) if isinstance(table, list) else ()
    for key, value in cast("Iterator[tuple[Any, Any]]", items):
        if isinstance(value, str) and (present := find_present_path(value)):
            yield table, key, Renaming(value, present)
        elif not isinstance(value, str):
            yield from _iter_import_paths(value)
