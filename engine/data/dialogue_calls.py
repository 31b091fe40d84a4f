"""Reads tool calls from messages of cold-start rows: from `tool_calls`, or from a text as the model writes them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from asterism.engine.data.data_files import DatasetError, RowFields
from asterism.engine.data.dialogue_messages import DatasetLocation, DialogueMessage
from asterism.engine.data.row_prompts import drop_nulls
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.tools.tool_arguments import ArgumentError, check_arguments


class UnknownFunction(DatasetError):
    """A call of a function that is not a tool of the dialogue."""

    def __init__(self, function: object, known: Sequence[str], location: DatasetLocation) -> None:
        self.function = str(function).encode("utf-8", "backslashreplace").decode()
        problem = f"unknown function {function!r}; known: {', '.join(known) or 'none'}"
        row, field = location.row, f"{location.field}.name"
        super().__init__(row.path, problem, row=row.number, field=field)


class DialogueCall(NamedTuple):
    tool: str
    arguments: RowFields


class CallReader(NamedTuple):
    """A reader of the calls of a dialogue."""

    dialogue: DialogueFormat
    tool_names: Mapping[str, str]  # names of the run's tools, by name of the function in the file

    def read_calls(self, message: DialogueMessage) -> Iterator[DialogueCall]:
        """Yield the calls in `tool_calls`. Raises DatasetError."""
        calls = message.fields.get("tool_calls") or []
        if not isinstance(calls, list):
            raise message.location.build_error("expected a list of calls", "tool_calls")
        for number, call in enumerate(cast(list[Any], calls)):
            field = f"{message.location.field}.tool_calls[{number}]"
            yield self.read_call(call, message.location._replace(field=field))

    def read_call(self, call: object, location: DatasetLocation) -> DialogueCall:
        """Read `{"name", "arguments"}`, also in `function`; arguments are an object or JSON. Raises DatasetError."""
        fields = cast(RowFields, call) if isinstance(call, dict) else {}
        function = cast(RowFields, fields["function"]) if isinstance(fields.get("function"), dict) else fields
        name, arguments = function.get("name"), function.get("arguments")
        tool = self.find_tool(name, location)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise location.build_error(f"not JSON: {error}", "arguments") from error
        else:
            arguments = drop_nulls(arguments)  # parquet, and JSON from parquet, fill absent keys with null
        if not isinstance(arguments, dict):
            raise location.build_error("expected an object or its JSON text", "arguments")
        given = cast(RowFields, arguments)
        if tool != name:
            self._check_renamed(given, tool, location)
        return DialogueCall(tool, given)

    def find_tool(self, name: object, location: DatasetLocation) -> str:
        """Return the name of the dialogue's tool with this name, or with its name in `tool_names`.

        Any name is valid if only the row's system text describes the tools. Raises UnknownFunction.
        """
        known = [tool.name for tool in self.dialogue.tools]
        if isinstance(name, str) and not known and "<tools>" in self.dialogue.system:
            return name
        for each in (name, self.tool_names.get(str(name))):
            if isinstance(each, str) and each in known:
                return each
        raise UnknownFunction(name, known, location)

    def _check_renamed(self, given: RowFields, tool: str, location: DatasetLocation) -> None:
        """Raise DatasetError for arguments that do not fit the tool: a rollout would refuse them."""
        schema = next(each for each in self.dialogue.tools if each.name == tool)
        try:
            check_arguments(given, schema.parameters)
        except ArgumentError as error:
            raise location.build_error(f"do not fit {tool}: {error}", "arguments") from error
