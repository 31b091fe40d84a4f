"""Maps the former names of keys and import paths to the present ones.

A configuration with a former name is refused, and the error names the new one; `asterism config --migrate FILE`
rewrites the file. In the configuration of a run folder, the loader replaces former names.
"""

import importlib.util
import re
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, cast

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
_DEMO_LINE = re.compile(r"^(\[?)tiny(?=[\s.=\]])", re.MULTILINE)
_IMPORT_PATH = re.compile(r"(?<![\w.])(bus|engine|actors|sandbox|policies|configs|tasks|analysis)(\.\w+)+:\w+")
_HEADER = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]+")
_ENTRY = re.compile(r"\s*(?P<key>[\w.-]+)\s*=\s*(?P<value>.*\n?)")
_STAGES = "stages"


class Renaming(NamedTuple):
    old: str  # a key, or an import path
    new: str


def find_renamings(table: Mapping[str, Any]) -> list[Renaming]:
    """Return the former names in a configuration, with the present ones."""
    roots = [table, *cast("list[Mapping[str, Any]]", table.get(_STAGES, []))]
    keys = [Renaming(old, new) for root in roots for old, new in RENAMED_KEYS.items() if _find_parent(root, old)]
    keys += [Renaming("tiny", "prepare.parameters")] if "tiny" in table else []
    return keys + [Renaming(value, f"asterism.{value}") for _, _, value in _iter_import_paths(table)]


def migrate(table: MutableMapping[str, Any]) -> None:
    """Replace the former names in a parsed configuration."""
    if "tiny" in table:
        table["prepare"] = {**tomllib.loads(_DEMO), "parameters": table.pop("tiny")}
    for root in (table, *table.get(_STAGES, [])):
        parents = {old: parent for old in RENAMED_KEYS if (parent := _find_parent(root, old)) is not None}
        # Remove all values first: `learner.loss` is a table now, in which other former keys are set.
        values = {old: parent.pop(old.rpartition(".")[2]) for old, parent in parents.items()}
        for old, value in values.items():
            if old not in _DROPPED_VALUES or value != _DROPPED_VALUES[old]:
                _set(root, RENAMED_KEYS[old], value)
    for parent, key, value in list(_iter_import_paths(table)):
        parent[key] = f"asterism.{value}"


def migrate_text(text: str) -> str:
    """Replace the former names in a TOML file, line by line, so that comments stay. Raises ValueError if a former name
    remains."""
    lines, section = list[str](), ""
    for line in _move_demo(text).splitlines(keepends=True):
        if header := _HEADER.match(line):
            section = re.sub(rf"^{_STAGES}\.?", "", header[1])
        lines.append(_IMPORT_PATH.sub(_rename_path, _rename_keys(line, section)))
    migrated, expected = "".join(lines), tomllib.loads(text)
    migrate(expected)
    if tomllib.loads(migrated) != expected:
        raise ValueError("a former key is neither at the start of a line nor in a table of one line")
    return migrated


def _move_demo(text: str) -> str:
    """Return the text with the former table [tiny] as parameters of the demo's program."""
    if not (first := _DEMO_LINE.search(text)):
        return text
    program = f"[prepare]\n{_DEMO}\n\n" if first[1] else f"prepare.{_DEMO}\n"
    return text[: first.start()] + program + _DEMO_LINE.sub(r"\1prepare.parameters", text[first.start() :])


def _rename_keys(line: str, section: str) -> str:
    """Return the line with present keys; empty for a key with a dropped value."""
    if not (entry := _ENTRY.match(line)):
        return line
    prefix = f"{section}." if section else ""
    key = f"{prefix}{entry['key']}"
    if entry["value"].startswith("{"):
        return line[: entry.start("value")] + re.sub(
            r"([{,]\s*)([\w.]+)(?=\s*=)", lambda found: found[1] + _rename(found[2], f"{key}."), entry["value"]
        )
    if key in _DROPPED_VALUES and float(entry["value"].partition("#")[0]) == _DROPPED_VALUES[key]:
        return ""
    return line[: entry.start("key")] + _rename(entry["key"], prefix) + line[entry.end("key") :]


def _rename(key: str, prefix: str) -> str:
    return RENAMED_KEYS.get(prefix + key, prefix + key).removeprefix(prefix)


def _rename_path(found: re.Match[str]) -> str:
    return f"asterism.{found[0]}" if _is_former_path(found[0]) else found[0]


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


def _iter_import_paths(table: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield container, key and value of each former import path of this project."""
    items = table.items() if isinstance(table, Mapping) else enumerate(table) if isinstance(table, list) else ()
    for key, value in cast("Iterator[tuple[Any, Any]]", items):
        if isinstance(value, str) and _is_former_path(value):
            yield table, key, str(value)
        elif not isinstance(value, str):
            yield from _iter_import_paths(value)


def _is_former_path(value: str) -> bool:
    """Return whether the module exists below `asterism`; a user can have a package named `tasks`."""
    if not _IMPORT_PATH.fullmatch(value):
        return False
    try:
        return importlib.util.find_spec(f"asterism.{value.partition(':')[0]}") is not None
    except ModuleNotFoundError:
        return False
