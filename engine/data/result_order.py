"""Orders results in the messages of cold-start rows: one for each call of the previous turn, in the order of calls.

A rollout gives each call one result, in order. Public data sets list results in the order in which parallel calls end,
with the id of the call in `tool_call_id`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from asterism.engine.data.data_files import RowDefect, RowFields
from asterism.engine.data.dialogue_messages import DialogueMessage

_RESPONSES = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
DEFECT = "other results than calls"


def list_call_ids(message: DialogueMessage, num_calls: int) -> list[str]:
    """Return the ids of a turn's calls, or "" without an id. The calls in the turn's text come first, without ids."""
    calls = message.fields.get("tool_calls")
    given = [_read_id(call, "id") for call in cast(list[Any], calls)] if isinstance(calls, list) else []
    return [*[""] * (num_calls - len(given)), *given]


def order_results(turn: Sequence[DialogueMessage], call_ids: Sequence[str]) -> list[str]:
    """Return one result for each call. Raise RowDefect for missing, surplus and unknown results.

    Without ids of calls or without ids of results, the results keep the order of the file. One message can contain the
    results of several calls as a JSON list.
    """
    if len(turn) == 1 and len(call_ids) > 1 and (listed := _read_list(turn[0], len(call_ids))):
        return listed
    results = [(_read_id(each.fields, "tool_call_id"), text) for each in turn for text in each.get_results()]
    ids = [each for each, _ in results]
    if len(results) != len(call_ids):
        raise _build_error(turn[0], f"{len(results)} results for {len(call_ids)} calls of the previous turn")
    if not any(ids) or not any(call_ids):
        return [text for _, text in results]
    if repeated := next((each for each in call_ids if each and call_ids.count(each) > 1), ""):
        raise _build_error(turn[0], f"several calls of the previous turn have the id {repeated!r}")
    if sorted(ids) != sorted(call_ids):
        unknown = next((each for each in ids if ids.count(each) > call_ids.count(each)), "")
        described = f"the id {unknown!r}" if unknown else "no id"
        raise _build_error(turn[0], f"a result with {described} belongs to no call of the previous turn")
    unnamed = (text for each, text in results if not each)
    by_id = {each: text for each, text in results if each}
    return [by_id[each] if each else next(unnamed) for each in call_ids]


def _read_list(message: DialogueMessage, num_calls: int) -> list[str]:
    """Return the elements, as texts, of a JSON list with one element for each call; empty for other texts."""
    try:
        values = json.loads(message.get_text())
    except (ValueError, RecursionError):
        return []
    if not isinstance(values, list) or len(elements := cast(list[Any], values)) != num_calls:
        return []
    return [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in elements]


def require_no_calls(message: DialogueMessage, call_ids: Sequence[str]) -> None:
    """Raise RowDefect for a user's text after calls, unless it contains the results as <tool_response> blocks."""
    num_results = len(_RESPONSES.findall(message.get_text())) if call_ids else 0
    if num_results != len(call_ids):
        raise _build_error(message, f"{num_results} results for {len(call_ids)} calls of the previous turn")


def _build_error(message: DialogueMessage, problem: str) -> RowDefect:
    return message.location.build_defect(DEFECT, f"{problem}; a rollout gives each call one result")


def _read_id(fields: object, name: str) -> str:
    value = cast(RowFields, fields).get(name) if isinstance(fields, dict) else None
    return str(value) if value not in (None, "") else ""
