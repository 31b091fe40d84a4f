"""`asterism config` prints all keys of a configuration with their values and descriptions, as TOML."""

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec
from rich.console import Console
from rich.markup import escape

from asterism.configs.atomic_write import write_atomically
from asterism.configs.load import load_run
from asterism.configs.loading.config_layers import ConfigError, read_layer
from asterism.configs.loading.error_messages import format_value
from asterism.configs.loading.renamed_keys import find_renamings, migrate_text
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import find_section, get_field_types, is_table_array

_COMMENT_COLUMN = 44
_FIELD = re.compile(r"^    (\w+): ")


def print_config(config: Path | None, overrides: Sequence[str], console: Console) -> None:
    """Print the configuration, or the defaults without a file. Raises ConfigError."""
    run = load_run(config, overrides if config else ['name="NAME"', *overrides])
    descriptions = read_descriptions(RunConfig)
    tables = {key: section for key, kind in get_field_types(RunConfig).items() if (section := find_section(kind))}
    for key in get_field_types(RunConfig):
        if key not in tables:
            _print_key(key, getattr(run, key), descriptions[key], console)
    for name, section in tables.items():
        value, heading = getattr(run, name), f"[{name}]"
        if isinstance(value, tuple):
            heading = f"[[{name}]]"
        values = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
        for table in values or (None,):
            _print_table(heading, section, table, console)


def migrate_file(file: Path, console: Console) -> None:
    """Rewrite a file that has former names of keys. Raises ConfigError if it cannot be read or rewritten."""
    layer = read_layer(file)
    renamings = find_renamings(layer.table)
    if renamings:
        try:
            migrated = migrate_text(file.read_bytes().decode("utf-8-sig"))  # bytes keep the line ends
        except ValueError as error:
            names = ", ".join(f"{each.old} -> {each.new}" for each in renamings)
            raise ConfigError(f"{file}: {error}; rename by hand: {names}") from None
        write_atomically(file, migrated.encode())
    for old, new in renamings:
        console.print(f"{old} -> {new}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{file}: {len(renamings)} names replaced", markup=False, highlight=False, soft_wrap=True)


def _print_table(heading: str, section: type[msgspec.Struct], table: object, console: Console) -> None:
    """Print the table. None stands for an absent table."""
    summary = (vars(section).get("__doc__") or "").partition("\n")[0]
    title = heading if table is not None else f"# absent: {heading}"
    console.print(f"\n[bold]{escape(title)}[/]" + (f"  # {escape(summary)}" if summary else ""), soft_wrap=True)
    if table is not None:
        values = msgspec.to_builtins(table)
        inner = {} if heading.startswith("[[") else _list_tables(section)
        for key, description in read_descriptions(section).items():
            if key not in inner:
                _print_key(key, values[key], description, console)
        for key, each in inner.items():
            _print_table(f"{heading[:-1]}.{key}]", each, getattr(table, key), console)


def _list_tables(section: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    types = get_field_types(section).items()
    return {key: inner for key, kind in types if not is_table_array(kind) and (inner := find_section(kind))}


def _print_key(key: str, value: object, description: str, console: Console) -> None:
    text = f"{key} = {_format_toml(msgspec.to_builtins(value))}"
    comment = f"  # {description}" if description else ""
    console.print(f"{text:<{_COMMENT_COLUMN}}{comment}".rstrip(), markup=False, highlight=False, soft_wrap=True)


def _format_toml(value: object) -> str:
    if not isinstance(value, dict):
        return format_value(value)
    entries = [f"{name} = {_format_toml(entry)}" for name, entry in cast("dict[str, object]", value).items()]
    return "{" + ", ".join(entries) + "}"


def read_descriptions(section: type[msgspec.Struct]) -> dict[str, str]:
    """Map each key to its comment in the schema's source, on the key's line or above it."""
    keys = {field.name: field.encode_name for field in msgspec.structs.fields(section)}
    return {keys[name]: text for name, text in _iter_described_fields(section) if name in keys}


def _iter_described_fields(section: type[msgspec.Struct]) -> Iterator[tuple[str, str]]:
    above, current, text = "", "", ""
    for line in inspect.getsource(section).splitlines():
        comment = re.sub(r"^.*?# (noqa: \S+  # )?", "", line) if "# " in line else ""
        if line.startswith("    def "):
            break
        if field := _FIELD.match(line):
            if current:
                yield current, text
            current, text, above = field[1], above or comment, ""
        elif line.startswith("    # "):
            above = f"{above} {comment}".strip()
        elif current and comment and not text:  # comment on a value that spans several lines
            text = comment
    if current:
        yield current, text
