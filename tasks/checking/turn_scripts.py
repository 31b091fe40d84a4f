"""Reads scripted turns of the assistant from a file, or makes them from the schemas of a task's tools."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.dialogue.tool_call_format import ToolCallFormat
from asterism.policies.tools.python_tools import PYTHON_TOOLS
from asterism.policies.tools.task_description import TaskKind
from asterism.policies.tools.tool_arguments import ArgumentError, JsonSchema, check_value
from asterism.policies.tools.tool_schema import ToolSchema

WRONG_ANSWER = "no answer"
_SEPARATOR = "---"  # line between the turns of a text file
_EXAMPLES = {"string": "text", "integer": 1, "number": 1.0, "boolean": True, "null": None}
_WRONG_VALUES = ([], "text", 1)  # wrong arguments: for each type, at least one of these values does not fit
_MAX_DEPTH = 8  # depth of a generated value


class TurnScript(msgspec.Struct, frozen=True):
    """Texts of the assistant's turns, as the model would generate them after the prefill."""

    turns: tuple[str, ...]
    is_generated: bool = True  # false: from a file
    has_truth: bool = False  # the last turn gives the row's ground truth as the answer


# ---------------------------------------------------------------- scripts from a file


def read_turn_script(path: Path, calls: ToolCallFormat) -> TurnScript:
    """Read a script. Raises UnusableInput."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableInput(f"--turns {path}: cannot be read: {error}") from None
    turns = _parse_lines(path, text, calls) if path.suffix in (".jsonl", ".json") else _split_text(text)
    if not turns:
        raise UnusableInput(f"--turns {path}: has no turns")
    return TurnScript(tuple(turns), is_generated=False)


def _split_text(text: str) -> list[str]:
    turns: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == _SEPARATOR:
            turns.append([])
        else:
            turns[-1].append(line)
    return [turn for lines in turns if (turn := "\n".join(lines).strip())]


def _parse_lines(path: Path, text: str, calls: ToolCallFormat) -> list[str]:
    turns: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                turns.append(_parse_line(json.loads(line), calls))
            except (ValueError, KeyError, TypeError):
                expected = '"text", {"content": "text"} or {"name": "TOOL", "arguments": {}}'
                raise UnusableInput(f"--turns {path}: line {number}: no turn; expected {expected}") from None
    return turns


def _parse_line(value: object, calls: ToolCallFormat) -> str:
    """Parse a turn. Raises ValueError, KeyError or TypeError."""
    if isinstance(value, str):
        return value
    fields = dict(cast(Mapping[str, Any], value))
    if "name" in fields:
        return calls.format_call(fields["name"], dict(fields["arguments"]))
    if not isinstance(fields["content"], str):
        raise TypeError
    return fields["content"]


def fill_columns(script: TurnScript, problem: DatasetProblem) -> TurnScript:
    """Replace `{column}` by the row's value."""
    values = {**problem.fields, "question": problem.question, "ground_truth": problem.ground_truth}
    turns = list(script.turns)
    for name, value in values.items():
        turns = [turn.replace(f"{{{name}}}", str(value)) for turn in turns]
    return TurnScript(tuple(turns), is_generated=False)


# ---------------------------------------------------------------- generated scripts


def generate_script(
    kind: TaskKind, dialogue: DialogueFormat, problem: DatasetProblem, number: int, *, is_bare: bool = False
) -> TurnScript:
    """Generate the script of play `number`. Even plays end with the ground truth as the answer, if there is one.

    `is_bare`: generate an answer without tags and box.
    """
    has_truth = bool(problem.ground_truth) and number % 2 == 0
    answer = problem.ground_truth if has_truth else WRONG_ANSWER
    start = _close_prefill(dialogue)
    if kind == "dialogue":
        said = [f"{start}My answer is {each}" for each in ("1", "2", answer)]
        return TurnScript(tuple(said), has_truth=has_truth)
    tools = [tool for tool in dialogue.tools if tool.name not in PYTHON_TOOLS]
    first = number % max(1, len(tools))  # a tool that ends the trajectory is not always the first
    tools = [*tools[first:], *tools[:first]]
    calls = [dialogue.calls.format_call(tool.name, generate_arguments(tool.parameters)) for tool in tools]
    if tools:
        calls.insert(0, dialogue.calls.format_call(tools[0].name, generate_wrong_arguments(tools[0].parameters)))
    return TurnScript(
        (*(start + call for call in calls), answer if is_bare else _write_answer(dialogue, answer)), has_truth=has_truth
    )


def generate_answer(dialogue: DialogueFormat, problem: DatasetProblem, *, has_truth: bool) -> TurnScript:
    """Generate one turn without calls: the ground truth of the row as the answer, or a wrong answer."""
    answer = problem.ground_truth if has_truth else WRONG_ANSWER
    return TurnScript((_write_answer(dialogue, answer),), has_truth=has_truth)


def _write_answer(dialogue: DialogueFormat, answer: str) -> str:
    return f"{_close_prefill(dialogue)}{dialogue.answer_open}\\boxed{{{answer}}}{dialogue.answer_close}"


def _close_prefill(dialogue: DialogueFormat) -> str:
    return "</reason>\n" if dialogue.prefill.rstrip().endswith("<reason>") else ""


def generate_arguments(parameters: JsonSchema) -> dict[str, Any]:
    """Generate a value for each parameter, of the parameter's type."""
    properties = cast(dict[str, JsonSchema], parameters.get("properties", {}))
    return {name: generate_value(schema) for name, schema in properties.items()}


def generate_wrong_arguments(parameters: JsonSchema) -> dict[str, Any]:
    """Generate a value of another type for one parameter, or else an unknown parameter."""
    arguments = generate_arguments(parameters)
    for name, schema in cast(dict[str, JsonSchema], parameters.get("properties", {})).items():
        for value in _WRONG_VALUES:
            try:
                check_value(value, schema, name)
            except ArgumentError:
                return {**arguments, name: value}
    return {**arguments, "unknown_parameter": 1}


def generate_value(schema: JsonSchema, depth: int = 0) -> Any:
    """Return the first choice, or an example of the first type."""
    if "default" in schema:
        return schema["default"]
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return generate_value(schema[key][0], depth)
    name = schema.get("type", "string")
    name = name if isinstance(name, str) else name[0]
    if name == "array":
        return [] if depth > _MAX_DEPTH else [generate_value(schema.get("items", {}), depth + 1)]
    if name == "object":
        return _generate_object(schema, depth)
    return schema.get("minimum", _EXAMPLES.get(name))


def _generate_object(schema: JsonSchema, depth: int) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        return {}
    if properties := cast(dict[str, JsonSchema], schema.get("properties", {})):
        return {name: generate_value(each, depth + 1) for name, each in properties.items()}
    values = schema.get("additionalProperties")
    return {"key": generate_value(cast(JsonSchema, values), depth + 1)} if isinstance(values, dict) else {}


# ---------------------------------------------------------------- signatures


def format_signature(tool: ToolSchema) -> str:
    """Format a signature such as `search(query: string, k?: integer)`."""
    required = cast(Sequence[str], tool.parameters.get("required", ()))
    properties = cast(dict[str, JsonSchema], tool.parameters.get("properties", {}))
    parts = (f"{name}{'' if name in required else '?'}: {_format_type(schema)}" for name, schema in properties.items())
    return f"{tool.name}({', '.join(parts)})"


def _format_type(schema: JsonSchema) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(map(_format_type, schema["anyOf"]))
    names = schema.get("type", "any")
    text = names if isinstance(names, str) else " | ".join(names)
    if text == "array" and "items" in schema:
        text = f"list[{_format_type(schema['items'])}]"
    return f"{text} | null" if schema.get("nullable") else text
