"""Chooses the format of a cold-start row: the run's format, or the row's own system text and tools (docs/data.md)."""

import json
from collections.abc import Mapping
from typing import Any, cast

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.engine.data.data_files import DatasetError, DatasetRow, RowFields
from asterism.engine.data.dialogue_messages import DatasetLocation, RowDialogue
from asterism.policies.dialogue.chat_format import TURN_END, TURN_START, DialogueFormat, replace_prompt
from asterism.policies.tools.task_description import DEFAULT_SYSTEM
from asterism.policies.tools.tool_schema import ToolSchema

_NO_PARAMETERS = {"type": "object", "properties": {}}


def choose_format(
    row: DatasetRow, dialogue: RowDialogue, formats: Mapping[str, DialogueFormat], file: SftFileConfig
) -> tuple[str, DialogueFormat]:
    """Return the row's `task` or the first task, and the task's format, with the row's own prompt if it differs.

    A run without [[tasks]] ignores `task`. A row with a system text and calls but without tools has the run's tools.
    Raises DatasetError.
    """
    first, name = next(iter(formats)), row.fields.get("task")
    if name is not None and first != "":
        if not isinstance(name, str) or name not in formats:
            problem = f"unknown task {name!r:.80}; known: {', '.join(formats)}"
            raise DatasetError(row.path, problem, row=row.number, field="task")
        return name, formats[name]
    run_format = formats[first]
    tools = parse_tools(row) if file.prompt == "row" else ()
    if file.prompt == "row":
        refuse_turn_tokens(dialogue.system, DatasetLocation(row, "system"))
    has_run_prompt = dialogue.system in ("", run_format.system) and tools in ((), run_format.tools)
    if file.prompt == "run" or has_run_prompt:
        return first, run_format
    describes_tools = "<tools>" in dialogue.system
    if tools and not (describes_tools and run_format.has_renderer):  # a renderer would repeat the tools
        return first, replace_prompt(run_format, dialogue.system or DEFAULT_SYSTEM, tools)
    needs_tools = dialogue.has_calls and not describes_tools
    return first, replace_prompt(run_format, dialogue.system, run_format.tools if needs_tools else ())


def parse_tools(row: DatasetRow) -> tuple[ToolSchema, ...]:
    """Parse the column `tools`, a list of schemas or its JSON text; empty without the column. Raises DatasetError."""
    here = DatasetLocation(row, "tools")
    value = _parse_json(row.fields.get("tools"), here)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise here.build_error("expected a list of tools")
    return tuple(
        _parse_tool(each, here._replace(field=f"tools[{number}]")) for number, each in enumerate(cast(list[Any], value))
    )


def _parse_tool(value: object, location: DatasetLocation) -> ToolSchema:
    """Parse a tool in the function-calling layout, or only its `function`."""
    tool = _parse_json(value, location)
    fields = cast(RowFields, tool) if isinstance(tool, dict) else {}
    function = cast(RowFields, fields["function"]) if isinstance(fields.get("function"), dict) else fields
    name, description = function.get("name"), function.get("description") or ""
    parameters = function.get("parameters") or _NO_PARAMETERS
    if not isinstance(name, str) or not isinstance(description, str) or not isinstance(parameters, dict):
        raise location.build_error("expected a function with `name`, `description` and `parameters`")
    if location.row.path.suffix == ".parquet" and not isinstance(location.row.fields["tools"], str):
        parameters = drop_nulls(parameters)
    return ToolSchema(name, description, parameters)


def _parse_json(value: object, location: DatasetLocation) -> object:
    """Return the value, or the value of a JSON text; None for an empty text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise location.build_error(f"not JSON: {error}") from error


def drop_nulls(value: Any) -> Any:
    """Remove keys that parquet fills with null, at any depth."""
    if isinstance(value, dict):
        return {key: drop_nulls(each) for key, each in cast(RowFields, value).items() if each is not None}
    return [drop_nulls(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def refuse_turn_tokens(text: str, location: DatasetLocation) -> None:
    """Raise DatasetError for tokens of the chat format, which would become special tokens in a trusted text."""
    if found := next((token for token in (TURN_START, TURN_END) if token in text), None):
        raise location.build_error(f"contains {found}, a token of the chat format")
