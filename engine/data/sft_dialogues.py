"""Tokenizes cold-start dialogues as a rollout does, with a loss mask over the assistant's tokens.

Training and rollouts both encode the segments of policies/dialogue/chat_format.py one by one, or render the chat format
of a model family (engine/data/family_dialogues.py), so that they use the same token ids.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from asterism.configs.schema.algorithm import SftFileConfig
from asterism.engine.data.data_files import BadRows, DatasetError, DatasetRow, RowDefect, RowFields, read_rows
from asterism.engine.data.dialogue_calls import CallReader, DialogueCall, UnknownFunction
from asterism.engine.data.dialogue_messages import DatasetLocation, DialogueMessage
from asterism.engine.data.family_dialogues import NO_FAMILIES, FamilyDialogues, TokenizedTurn
from asterism.engine.data.result_order import list_call_ids, order_results, require_no_calls
from asterism.engine.data.row_layouts import list_columns, read_dialogue
from asterism.engine.data.row_prompts import choose_format, refuse_turn_tokens
from asterism.policies.dialogue.call_blocks import CallBlock, iter_call_blocks, replace_call_blocks
from asterism.policies.dialogue.chat_format import (
    TURN_END,
    DialogueFormat,
    TextSegment,
    TextTokenizer,
    build_prompt_segments,
    build_tool_turn_segments,
    build_user_turn_segments,
    encode_segments,
)
from asterism.policies.dialogue.parse_turn import MalformedCall, find_calls, parse_assistant_turn

PLAIN_FILE = SftFileConfig(name="data", data="")
_MAX_LISTED = 5  # unknown functions that an error message lists

Turns = list[tuple[str, list[TextSegment]]]  # role and segments of each turn
Converted = TypeVar("Converted")


class RowMessages(NamedTuple):
    """The dialogue of a row, its task, and the reader of its calls."""

    messages: list[DialogueMessage]
    task: str
    reader: CallReader


class TokenizedDialogue(NamedTuple):
    name: str  # FILE:ROW; in a folder, FILE is the part
    token_ids: list[int]  # [T]
    loss_mask: list[int]  # [T]; 1 for tokens that the assistant generates, including its end of turn


def iter_sft_dialogues(
    path: Path,
    tokenizer: TextTokenizer,
    formats: Mapping[str, DialogueFormat],
    file: SftFileConfig = PLAIN_FILE,
    bad_rows: BadRows | None = None,
    families: Mapping[str, FamilyDialogues] = NO_FAMILIES,
) -> Iterator[TokenizedDialogue]:
    """Yield one tokenized dialogue per row. Raises DatasetError with file, row and field.

    `formats`: the format of each task. `file`: the options of the file's rows. `bad_rows`: collects unusable rows up to
    its limit. `families`: tasks with dialogue.renderer; other tasks use ChatML.
    """

    def tokenize(row: RowMessages) -> list[TokenizedTurn]:
        if (family := families.get(row.task)) is not None:
            return list(family.tokenize(row.messages, row.reader))
        return [
            TokenizedTurn(role == "assistant", encode_segments(tokenizer, segments))
            for role, segments in _build_turns(row)
        ]

    for row, turns in _convert_rows(path, formats, file, bad_rows, tokenize):
        tokenized = TokenizedDialogue(f"{row.path.name}:{row.number}", [], [])
        for turn in turns:
            tokenized.token_ids.extend(turn.token_ids)
            tokenized.loss_mask.extend([int(turn.is_trained)] * len(turn.token_ids))
        yield tokenized


def count_sft_dialogues(
    path: Path,
    formats: Mapping[str, DialogueFormat],
    max_rows: int,
    file: SftFileConfig = PLAIN_FILE,
    bad_rows: BadRows | None = None,
    families: Mapping[str, FamilyDialogues] = NO_FAMILIES,
) -> int:
    """Check and count up to `max_rows` dialogues; tokenize only tasks of `families`. Raises DatasetError."""

    def check(row: RowMessages) -> None:
        if (family := families.get(row.task)) is not None:
            list(family.tokenize(row.messages, row.reader))
        else:
            _build_turns(row)

    return sum(1 for _ in islice(_convert_rows(path, formats, file, bad_rows, check), max_rows))


def iter_sft_texts(
    path: Path,
    formats: Mapping[str, DialogueFormat],
    max_rows: int,
    file: SftFileConfig = PLAIN_FILE,
    bad_rows: BadRows | None = None,
) -> Iterator[str]:
    """Yield the texts of up to `max_rows` dialogues as ChatML tokenizes them. Raises DatasetError."""
    for _, turns in islice(_convert_rows(path, formats, file, bad_rows, _build_turns), max_rows):
        yield from (segment.text for _, segments in turns for segment in segments)


def describe_bad_rows(errors: Sequence[DatasetError]) -> str:
    """Describe the number of errors, the first error, and rows by defect and unknown function; empty without errors."""
    if not errors:
        return ""
    functions = Counter(error.function for error in errors if isinstance(error, UnknownFunction))
    named = ", ".join(f"{name} ({count})" for name, count in functions.most_common(_MAX_LISTED))
    unknown = f"; unknown functions by number of rows: {named}, see tool_names in docs/data.md" if named else ""
    kinds = Counter(error.kind for error in errors if isinstance(error, RowDefect))
    defects = "".join(f"; {count:,} with {kind}" for kind, count in kinds.most_common())
    return f"{len(errors):,} unusable rows are skipped, the first: {errors[0]}{defects}{unknown}"


# ---------------------------------------------------------------- one row


def _convert_rows(
    path: Path,
    formats: Mapping[str, DialogueFormat],
    file: SftFileConfig,
    bad_rows: BadRows | None,
    convert: Callable[[RowMessages], Converted],
) -> Iterator[tuple[DatasetRow, Converted]]:
    """Yield converted rows. `convert` raises DatasetError, and UnicodeEncodeError for half of a surrogate pair."""
    bad_rows = bad_rows or BadRows()
    has_usable_row = False
    for row in read_rows(path, list_columns(file), bad_rows):
        try:
            found = _read_messages(row, formats, file)
            if found is None:
                continue
            converted = convert(found)
        except UnicodeEncodeError as error:  # JSON text in a field can contain half of a surrogate pair
            bad_rows.add(DatasetError(row.path, f"no Unicode text: {error}", row=row.number))
        except DatasetError as error:
            bad_rows.add(error)
        else:
            has_usable_row = True
            yield row, converted
    if not has_usable_row:
        left_out = "each row is left out by `where` or `program_tool` of its [[sft.mixture]]"
        raise DatasetError(path, f"no usable dialogue: {describe_bad_rows(bad_rows.errors) or left_out}")


def _read_messages(row: DatasetRow, formats: Mapping[str, DialogueFormat], file: SftFileConfig) -> RowMessages | None:
    """Read the messages of a row. Return None for a row that the file leaves out. Raises DatasetError."""
    found = read_dialogue(row, file)
    if found is None:
        return None
    prompted, parsed = found
    task, dialogue = choose_format(prompted, parsed, formats, file)
    has_run_tools = any(dialogue.tools is each.tools for each in formats.values())
    return RowMessages(parsed.messages, task, CallReader(dialogue, file.tool_names if has_run_tools else {}))


def _build_turns(row: RowMessages) -> Turns:
    """Build the segments of all turns with the texts of ChatML. Raises UnicodeEncodeError."""
    turns = list(_iter_turns(row.messages, row.reader))
    for _, segments in turns:
        for segment in segments:
            segment.text.encode()
    return turns


def _iter_turns(messages: list[DialogueMessage], reader: CallReader) -> Iterator[tuple[str, list[TextSegment]]]:
    call_ids: list[str] = []  # calls of the previous assistant's turn
    for first, (role, group) in enumerate(groupby(messages, key=lambda message: message.role)):
        turn = list(group)
        match role:
            case "assistant":
                text, call_ids = _format_assistant_text(turn[0], reader)
                yield role, [TextSegment(text, True)]
            case "tool":
                yield role, build_tool_turn_segments(order_results(turn, call_ids), reader.dialogue)
            case _:
                require_no_calls(turn[0], call_ids)
                yield role, _build_user_segments(turn[0], reader.dialogue, first=first == 0)


def _build_user_segments(message: DialogueMessage, dialogue: DialogueFormat, *, first: bool) -> list[TextSegment]:
    """Build a user turn. Only the first user turn includes the system message and the instruction.

    If the task has an opening, the first message is the question followed by the observation.
    """
    text = message.get_text()
    if first:
        return build_prompt_segments(text.removeprefix(dialogue.instruction), dialogue)
    return build_user_turn_segments(text, dialogue)


def _format_assistant_text(message: DialogueMessage, reader: CallReader) -> tuple[str, list[str]]:
    """Return an assistant's generated text, without prefill and with the end of turn, and the ids of its calls."""
    prefill, form = reader.dialogue.prefill, reader.dialogue.calls
    text = message.get_turn_text(prefill, form).removeprefix(prefill)
    refuse_turn_tokens(text, message.location._replace(field=f"{message.location.field}.content"))
    if reader.dialogue.tools and form.opening in text:
        text = _rename_calls(text, message.location, reader)
    calls = list(reader.read_calls(message))
    turn = text
    for call in calls:
        separator = "" if prefill + turn == "" or turn.endswith("\n") else "\n"
        turn += separator + form.format_call(call.tool, call.arguments)
    if calls:
        _require_calls(turn, text, calls, message.location, reader)
    can_call = reader.dialogue.tools or "<tools>" in reader.dialogue.system
    num_calls = len(find_calls(turn, reader.dialogue)) if can_call else 0
    return turn + TURN_END, list_call_ids(message, num_calls)


def _require_calls(
    turn: str, text: str, calls: Sequence[DialogueCall], location: DatasetLocation, reader: CallReader
) -> None:
    """Raise DatasetError unless a rollout reads these calls in the turn: the calls of its text, then `calls`."""
    here = location._replace(field=f"{location.field}.tool_calls")
    refuse_turn_tokens(turn, here)
    form = reader.dialogue.calls
    added = "".join(form.format_call(*call) for call in calls)
    blocks = [*iter_call_blocks(text, form), *iter_call_blocks(added, form)]
    if [block.content for block in blocks] != [block.content for block in iter_call_blocks(turn, form)]:
        raise here.build_error(
            "a rollout would read other calls in this turn: its text has a tag of a call without its pair"
        )
    for read in parse_assistant_turn(turn, reader.dialogue).calls[-len(calls) :]:
        if isinstance(read, MalformedCall) and not read.is_decoded:
            raise here.build_error(f"a rollout cannot read a call of this turn: {read.error}")


def _rename_calls(text: str, location: DatasetLocation, reader: CallReader) -> str:
    """Rename calls of functions in `tool_names`. Other calls, also malformed calls, stay unchanged."""
    content, form = location._replace(field=f"{location.field}.content"), reader.dialogue.calls

    def rename(block: CallBlock) -> str:
        written = text[block.start : block.end]
        try:
            call = form.read_call(block.content.strip(), reader.dialogue.tools)
        except ValueError:
            return written
        name = cast(RowFields, call).get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or reader.find_tool(name, content) == name:
            return written
        return form.format_call(*reader.read_call(call, location))

    return replace_call_blocks(text, form, rename)
