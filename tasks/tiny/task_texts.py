"""Collects training texts and added tokens of the tokenizer for a run with [[tasks]].

The texts are the dialogues of `sft.data` in their tokenized form, and the rows of the tasks' data files.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.data_files import BadRows, read_rows
from asterism.engine.data.sft_dialogues import iter_sft_texts
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.dialogue.tool_results import FAILURE, SUCCESS
from asterism.policies.tools.tool_schema import ToolSchema
from asterism.tasks.tiny.tiny_tokenizer import AddedTexts, list_special_texts

MAX_ROWS = 3000  # rows that are read of each file; more rows produce the same merges


def iter_task_texts(run: RunConfig, folder: RunFolder, formats: Mapping[str, DialogueFormat]) -> Iterator[str]:
    """Yield the training texts. Raises UnusableInput, which names the key of the file."""
    if run.sft.is_enabled:
        for key, file in run.sft.files.items():
            path, bad_rows = folder.expand_path(file.data), BadRows(run.sft.max_bad_rows, "sft.max_bad_rows")
            yield from _name_key(key, iter_sft_texts(path, formats, MAX_ROWS, file, bad_rows))
    for task in run.resolved_tasks:
        path, bad_rows = folder.expand_path(task.data), BadRows(run.data.max_bad_rows, "data.max_bad_rows")
        yield from _name_key(f'tasks: "{task.name}": data', _iter_row_texts(path, bad_rows))


def _name_key(key: str, texts: Iterator[str]) -> Iterator[str]:
    try:
        yield from texts
    except UnusableInput as error:
        raise UnusableInput(f"{key}: {error}") from None


def _iter_row_texts(path: Path, bad_rows: BadRows) -> Iterator[str]:
    for row in islice(read_rows(path, bad_rows=bad_rows), MAX_ROWS):
        yield from _iter_strings(row.fields)


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value except the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        inner = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        for each in inner:
            yield from _iter_strings(each)


def collect_added_texts(formats: Iterable[DialogueFormat]) -> AddedTexts:
    """Collect the fixed texts of the dialogues, the frames of calls and the first lines of Python's results."""
    formats = list(formats)
    tools = [tool for dialogue in formats for tool in dialogue.tools]
    frames = [piece for tool in tools for piece in _build_call_frame(tool)]
    results = [f"{SUCCESS}\nstdout:\n", f"{FAILURE}\n"] if tools else []
    special = list_special_texts(formats)
    plain = dict.fromkeys([*frames, *results, "\\boxed{"])
    return AddedTexts(special, [text for text in plain if text not in special])


def _build_call_frame(tool: ToolSchema) -> tuple[str, str]:
    """Return the text of a call before and after the value of its first parameter."""
    properties: dict[str, dict[str, Any]] = tool.parameters["properties"]
    start = f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": {{'
    if not properties:
        return start, "}}\n"
    name, schema = next(iter(properties.items()))
    quote = '"' if schema.get("type") == "string" else ""
    return f"{start}{json.dumps(name, ensure_ascii=False)}: {quote}", f"{quote}}}}}\n"
