"""Tokenizes cold-start dialogues as a rollout does, with a loss mask over the assistant's tokens.

Both encode the segments of policies/dialogue/chat_format.py one by one, so that training and
generation use the same token ids.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from configs.algorithm import SftFileConfig
from engine.data.data_files import BadRows, DatasetError, DatasetRow, RowFields, read_rows
from engine.data.dialogue_messages import DatasetLocation, DialogueMessage
from engine.data.row_layouts import list_columns, read_dialogue
from engine.data.row_prompts import choose_format, drop_nulls, refuse_turn_tokens
from policies.dialogue.chat_format import (
    TURN_END,
    DialogueFormat,
    TextSegment,
    TextTokenizer,
    build_prompt_segments,
    build_tool_turn_segments,
    build_user_turn_segments,
    encode_segments,
    format_tool_call,
)
from policies.tools.tool_arguments import ArgumentError, check_arguments

PLAIN_FILE = SftFileConfig(name="data", data="")
_CALL_IN_TEXT = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MAX_LISTED = 5  # unknown functions of a message

Turns = list[tuple[str, list[TextSegment]]]  # role and segments of each turn


class UnknownFunction(DatasetError):
    """A call of a function that is no tool of the dialogue, at a place in a data file."""

    def __init__(self, function: object, known: Sequence[str], location: DatasetLocation) -> None:
        self.function = str(function).encode("utf-8", "backslashreplace").decode()
        problem = f"unknown function {function!r}; known: {', '.join(known) or 'none'}"
        row, field = location.row, f"{location.field}.name"
        super().__init__(row.path, problem, row=row.number, field=field)


class TokenizedDialogue(NamedTuple):
    name: str  # FILE:ROW; in a folder, the part's
    token_ids: list[int]  # [T]
    loss_mask: list[int]  # [T]; 1 for tokens that the assistant generates, its end of turn included


def iter_sft_dialogues(
    path: Path,
    tokenizer: TextTokenizer,
    formats: Mapping[str, DialogueFormat],
    file: SftFileConfig = PLAIN_FILE,
    bad_rows: BadRows | None = None,
) -> Iterator[TokenizedDialogue]:
    """One sequence per row, from its messages. Raises DatasetError with file, row and field.

    `formats`: by name of the task. `file`: how its rows are read. `bad_rows`: as many rows may be unusable.
    """
    for row, turns in _iter_turns(path, formats, file, bad_rows):
        tokenized = TokenizedDialogue(f"{row.path.name}:{row.number}", [], [])
        for role, segments in turns:
            token_ids = encode_segments(tokenizer, segments)
            tokenized.token_ids.extend(token_ids)
            tokenized.loss_mask.extend([int(role == "assistant")] * len(token_ids))
        yield tokenized


def count_sft_dialogues(
    path: Path,
    formats: Mapping[str, DialogueFormat],
    max_rows: int,
    file: SftFileConfig = PLAIN_FILE,
    bad_rows: BadRows | None = None,
) -> int:
    """Checks that many dialogues without tokenizing them. Raises DatasetError."""
    return sum(1 for _ in islice(_iter_turns(path, formats, file, bad_rows), max_rows))


def iter_sft_texts(
    path: Path,
    formats: Mapping[str, DialogueFormat],
    max_rows: int,
    file: SftFileConfig = PLAIN_FILE,
    bad_rows: BadRows | None = None,
) -> Iterator[str]:
    """The texts of that many dialogues as they are tokenized. Raises DatasetError."""
    for _, turns in islice(_iter_turns(path, formats, file, bad_rows), max_rows):
        yield from (segment.text for _, segments in turns for segment in segments)


def describe_bad_rows(errors: Sequence[DatasetError]) -> str:
    """Their number, the first one, and the unknown functions by number of rows; empty without rows."""
    if not errors:
        return ""
    functions = Counter(error.function for error in errors if isinstance(error, UnknownFunction))
    named = ", ".join(f"{name} ({count})" for name, count in functions.most_common(_MAX_LISTED))
    unknown = f"; unknown functions by number of rows: {named}, see tool_names in docs/data.md" if named else ""
    return f"{len(errors):,} unusable rows are skipped, the first: {errors[0]}{unknown}"


# ---------------------------------------------------------------- one row


def _iter_turns(
    path: Path, formats: Mapping[str, DialogueFormat], file: SftFileConfig, bad_rows: BadRows | None
) -> Iterator[tuple[DatasetRow, Turns]]:
    bad_rows = bad_rows or BadRows()
    has_usable_row = False
    for row in read_rows(path, list_columns(file), bad_rows):
        try:
            found = read_dialogue(row, file)
            if found is None:
                continue
            prompted, parsed = found
            dialogue = choose_format(prompted, parsed, formats, file)
            has_run_tools = any(dialogue.tools is each.tools for each in formats.values())
            turns = list(_render_turns(parsed.messages, dialogue, file.tool_names if has_run_tools else {}))
            _require_unicode(turns, row)
        except DatasetError as error:
            bad_rows.add(error)
        else:
            has_usable_row = True
            yield row, turns
    if not has_usable_row:
        left_out = "each row is left out by `where` or `program_tool` of its [[sft.mixture]]"
        raise DatasetError(path, f"no usable dialogue: {describe_bad_rows(bad_rows.errors) or left_out}")


def _require_unicode(turns: Turns, row: DatasetRow) -> None:
    """JSON text in a field may contain half of a character, which no tokenizer takes. Raises DatasetError."""
    try:
        for _, segments in turns:
            for segment in segments:
                segment.text.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(row.path, f"no Unicode text: {error}", row=row.number) from None


def _render_turns(
    messages: list[DialogueMessage], dialogue: DialogueFormat, tool_names: Mapping[str, str]
) -> Iterator[tuple[str, list[TextSegment]]]:
    for first, (role, group) in enumerate(groupby(messages, key=lambda message: message.role)):
        turn = list(group)
        match role:
            case "assistant":
                yield role, [TextSegment(_format_assistant_text(turn[0], dialogue, tool_names), True)]
            case "tool":
                results = chain.from_iterable(message.get_results() for message in turn)
                yield role, build_tool_turn_segments(list(results), dialogue)
            case _:
                yield role, _build_user_segments(turn[0], dialogue, first=first == 0)


def _build_user_segments(message: DialogueMessage, dialogue: DialogueFormat, *, first: bool) -> list[TextSegment]:
    """The first user turn includes the system message and the instruction; later ones do not.

    If the task has an opening, the first message is the question with the observation after it.
    """
    text = message.get_text()
    if first:
        return build_prompt_segments(text.removeprefix(dialogue.instruction), dialogue)
    return build_user_turn_segments(text, dialogue)


def _format_assistant_text(message: DialogueMessage, dialogue: DialogueFormat, tool_names: Mapping[str, str]) -> str:
    """The generated text of an assistant's turn: without the prefill, with the end of turn."""
    text = message.get_turn_text(dialogue.prefill).removeprefix(dialogue.prefill)
    refuse_turn_tokens(text, message.location._replace(field=f"{message.location.field}.content"))
    if dialogue.tools and "<tool_call>" in text:
        text = _rename_calls(text, message.location, dialogue, tool_names)
    calls = message.fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise message.location.build_error("expected a list of calls", "tool_calls")
    for number, call in enumerate(cast(list[Any], calls)):
        location = message.location._replace(field=f"{message.location.field}.tool_calls[{number}]")
        separator = "" if dialogue.prefill + text == "" or text.endswith("\n") else "\n"
        text += separator + _format_tool_call(call, location, dialogue, tool_names)
    return text + TURN_END


def _rename_calls(text: str, location: DatasetLocation, dialogue: DialogueFormat, tool_names: Mapping[str, str]) -> str:
    """With the calls of functions in `tool_names` replaced. Other calls stay as they are, also malformed ones."""

    def rename(found: re.Match[str]) -> str:
        try:
            call = json.loads(found[1])
        except (ValueError, RecursionError):
            return found[0]
        name = cast(RowFields, call).get("name") if isinstance(call, dict) else None
        if not isinstance(name, str):
            return found[0]
        is_renamed = (
            _find_tool(name, location._replace(field=f"{location.field}.content"), dialogue, tool_names) != name
        )
        return _format_tool_call(call, location, dialogue, tool_names) if is_renamed else found[0]

    return _CALL_IN_TEXT.sub(rename, text)


def _format_tool_call(
    call: object, location: DatasetLocation, dialogue: DialogueFormat, tool_names: Mapping[str, str]
) -> str:
    """Accepts `{"name", "arguments"}` or that inside `function`; arguments as an object or JSON."""
    fields = cast(RowFields, call) if isinstance(call, dict) else {}
    function = cast(RowFields, fields["function"]) if isinstance(fields.get("function"), dict) else fields
    name, arguments = function.get("name"), function.get("arguments")
    tool = _find_tool(name, location, dialogue, tool_names)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise location.build_error(f"not JSON: {error}", "arguments") from error
    else:
        arguments = drop_nulls(arguments)  # parquet, and JSON made from it, fill absent keys with null
    if not isinstance(arguments, dict):
        raise location.build_error("expected an object or its JSON text", "arguments")
    given = cast(RowFields, arguments)
    if tool != name:
        _check_renamed(given, tool, location, dialogue)
    return format_tool_call(tool, given)


def _find_tool(name: object, location: DatasetLocation, dialogue: DialogueFormat, tool_names: Mapping[str, str]) -> str:
    """A tool of the dialogue: of that name, or of that in `tool_names`. Raises UnknownFunction.

    Any name if only the row's system text describes the tools.
    """
    known = [tool.name for tool in dialogue.tools]
    if isinstance(name, str) and not known and "<tools>" in dialogue.system:
        return name
    for each in (name, tool_names.get(str(name))):
        if isinstance(each, str) and each in known:
            return each
    raise UnknownFunction(name, known, location)


def _check_renamed(given: RowFields, tool: str, location: DatasetLocation, dialogue: DialogueFormat) -> None:
    """A rollout would refuse arguments that do not fit the tool."""
    schema = next(each for each in dialogue.tools if each.name == tool)
    try:
        check_arguments(given, schema.parameters)
    except ArgumentError as error:
        raise location.build_error(f"do not fit {tool}: {error}", "arguments") from error
