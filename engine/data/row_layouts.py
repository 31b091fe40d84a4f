"""Reads a cold-start row by the keys of [[sft.mixture]] and the columns of public data sets (docs/data.md)."""

import re
from typing import Any, cast

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.engine.data.call_lists import convert_call_lists
from asterism.engine.data.data_files import DatasetError, DatasetRow
from asterism.engine.data.dialogue_messages import DIALOGUE_COLUMNS, RowDialogue, parse_dialogue

_COLUMNS = (*DIALOGUE_COLUMNS, "instruction", "response", "input", "output", "system_prompt")
_PROGRAM = re.compile(
    r"^```(?:python3?|py)[ \t]*\r?\n(.*?)\r?\n```[ \t]*\r?$", re.DOTALL | re.IGNORECASE | re.MULTILINE
)


def list_columns(file: SftFileConfig) -> tuple[str, ...]:
    return (*_COLUMNS, *file.where)


def read_dialogue(row: DatasetRow, file: SftFileConfig) -> tuple[DatasetRow, RowDialogue] | None:
    """Return the row, with `tools` from its system text, and its messages. Raises DatasetError with the field.

    Returns None for a row that `where` leaves out, or that does not have exactly one program.
    """
    if any(row.fields.get(column) != value for column, value in file.where.items()):
        return None
    has_messages = any(row.fields.get(name) is not None for name in ("messages", "conversations"))
    if file.program_tool:
        called = _call_program(row, file.program_tool)
        if called is None:
            return None
        row = called
    elif not has_messages and row.fields.get("output") is not None:
        row = _join_output(row)
    dialogue = parse_dialogue(row)
    if file.calls == "python":
        dialogue, functions = convert_call_lists(dialogue)
        row = _replace_fields(row, tools=row.fields.get("tools") or functions)
    return row, dialogue


def _call_program(row: DatasetRow, tool: str) -> DatasetRow | None:
    """Return messages: the instruction, and a call that runs the program of the response. Needs exactly one program."""
    response = row.fields.get("response")
    programs = _PROGRAM.findall(response) if isinstance(response, str) else []
    if len(programs) != 1:
        return None
    question = _get_text(row, "instruction")
    call = {"name": tool, "arguments": {"code": programs[0]}}
    messages = [{"role": "user", "content": question}, {"role": "assistant", "tool_calls": [call]}]
    return _replace_fields(row, messages=messages)


def _join_output(row: DatasetRow) -> DatasetRow:
    """Join the messages in `input` and the assistant's answer in `output`."""
    messages = row.fields.get("input")
    if not isinstance(messages, list):
        raise DatasetError(row.path, "expected a list of messages", row=row.number, field="input")
    answer = {"role": "assistant", "content": _get_text(row, "output")}
    system = row.fields.get("system") or row.fields.get("system_prompt")
    return _replace_fields(row, messages=[*cast(list[Any], messages), answer], system=system)


def _get_text(row: DatasetRow, name: str) -> str:
    value = row.fields.get(name)
    if not isinstance(value, str):
        raise DatasetError(row.path, "expected a string", row=row.number, field=name)
    return value


def _replace_fields(row: DatasetRow, **fields: Any) -> DatasetRow:
    return row._replace(fields=row.fields | fields)
