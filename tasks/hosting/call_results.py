"""Converts the results of a task's code to observations, which enter the model's prompt."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, cast

from asterism.bus.messages import Observation
from asterism.policies.dialogue.tool_results import truncate_middle
from asterism.tasks.contract import Fault

_MAX_SHOWN_CHARACTERS = 80
_RESULT_KEYS = {"content", "messages", "stop", "done", "rewards", "metrics", "fault"}
_CONTENT_KEYS = ("content", "messages")  # key of a tool's result, and key of a dialogue's opening or reply


class UnusableResult(Exception):
    """The task's code returned neither text nor a result. The message names the type."""


def describe_error(error: BaseException, limit: int) -> str:
    """Return the error's type and text, in characters that UTF-8 can encode."""
    try:
        text = str(error)
    except Exception:  # from the user's __str__
        text = ""
    return replace_surrogates(f"{type(error).__name__}: {text}"[:limit])


def replace_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


class _Fields(NamedTuple):
    content: object
    stop: bool
    rewards: object
    metrics: object
    fault: object


def build_observation(value: object, limit: int) -> Observation:
    """Build an observation of at most `limit` characters. Raises UnusableResult, and Fault if the result is a fault."""
    fields = _read_fields(value)
    if fields is None:
        return Observation(truncate_middle(render_text(value), limit))
    if fields.fault is not None:
        raise Fault(str(fields.fault))
    content = truncate_middle(render_text(fields.content), limit)
    rewards, metrics = parse_numbers(fields.rewards, "rewards"), parse_numbers(fields.metrics, "metrics")
    return Observation(content, fields.stop, rewards, metrics)


def _read_fields(value: object) -> _Fields | None:
    """Read an object or a dict with the names of a result's fields. Return None for a plain value."""
    if isinstance(value, dict):
        table = cast(dict[str, Any], value)
        if not set(table) <= _RESULT_KEYS:
            return None
    else:
        table = {key: getattr(value, key) for key in _RESULT_KEYS if hasattr(value, key)}
    key = next((key for key in _CONTENT_KEYS if key in table), None)
    if key is None:
        return None
    stop = bool(table.get("stop") or table.get("done"))
    return _Fields(table[key], stop, table.get("rewards"), table.get("metrics"), table.get("fault"))


def render_text(value: object) -> str:
    """Return text unchanged, numbers in Python's notation, messages and content blocks as joined texts, and other lists
    and dicts as JSON. Raises UnusableResult for other values."""
    match value:
        case str():
            return replace_surrogates(value)
        case None | bool() | int() | float():
            return str(value)
        case list() | tuple() if value and all(map(_is_block, cast(Sequence[object], value))):
            return "\n\n".join(_render_block(block) for block in cast(Sequence[dict[str, Any]], value))
        case list() | tuple() | dict():
            try:
                return replace_surrogates(json.dumps(value, ensure_ascii=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise UnusableResult(f"returned {_describe(value)}, which is no JSON value: {error}") from None
        case _:
            raise UnusableResult(f"returned {_describe(value)}; expected text, a JSON value or a ToolResult")


def _is_block(value: object) -> bool:
    """Return whether the value is a message ("role" and "content") or a content block ("type")."""
    return isinstance(value, dict) and (
        {"role", "content"} <= value.keys() or (isinstance(value.get("type"), str) and len(cast(Any, value)) > 1)
    )


def _render_block(block: Mapping[str, Any]) -> str:
    if "content" in block:
        return render_text(block["content"])
    if block["type"] != "text" or not isinstance(block.get("text"), str):
        raise UnusableResult(f'returned a content block of the type "{block["type"]}"; only text is supported')
    return render_text(block["text"])


def parse_numbers(value: object, name: str) -> dict[str, float]:
    """Return finite numbers by name. Raises UnusableResult for other values."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnusableResult(f"returned {name} = {_describe(value)}; expected numbers by name")
    named = {replace_surrogates(str(key)): number for key, number in cast(Mapping[object, object], value).items()}
    return {key: parse_number(number, f"{name}.{key}") for key, number in named.items()}


def parse_number(value: object, name: str) -> float:
    """Return a finite number. Raises UnusableResult for other values."""
    try:
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError):  # for an array, or a large integer
        number = math.nan
    if not math.isfinite(number):
        raise UnusableResult(f"returned {name} = {_describe(value)}; expected a finite number")
    return number


def _describe(value: object) -> str:
    name = type(value).__name__
    try:
        text = replace_surrogates(repr(value)) if isinstance(value, str | int | float | None) else ""
    except ValueError:  # an integer with too many digits
        text = ""
    return f"{name} {text[:_MAX_SHOWN_CHARACTERS]}" if text else name
