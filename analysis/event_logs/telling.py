"""What an event says, in a line for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, assert_never

import msgspec

from bus.messages import (
    AnyMessage,
    BatchReady,
    CodeFinished,
    CodeOutcome,
    LeaseDeferred,
    LeaseGranted,
    LeaseParked,
    LeaseReleased,
    LeaseRequested,
    StartGroup,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
)
from configs.schema import Dialogue
from policies.dialogue import TextTokenizer
from policies.record import bytes_to_ids
from policies.tool_text import result_text

_IDS = ("token_ids", "prompt_ids")
_ARRAYS = (*_IDS, "loss_mask", "logprobs", "versions")
_EXCERPT = 240  # characters
_BEFORE = 60  # of them before what was searched for


class Words(NamedTuple):
    """What turns tokens and outcomes into the texts that the model wrote and read."""

    tokenizer: TextTokenizer
    dialogue: Dialogue

    def of(self, token_ids: bytes) -> str:
        return self.tokenizer.decode(bytes_to_ids(token_ids))

    def result(self, outcome: CodeOutcome) -> str:
        return result_text(outcome, self.dialogue.result_characters, self.dialogue.result_format)


def told(message: AnyMessage, words: Words) -> str:
    """All but whom it is about; texts whole, with their line breaks."""
    match message:
        case LeaseRequested() | LeaseDeferred() | LeaseGranted() | LeaseParked() | LeaseReleased():
            return _told_of_lease(message)
        case StartGroup():
            return (
                f"group {message.group_id}, {message.problem}, truth {message.ground_truth!r}, {message.size} siblings"
            )
        case TurnGenerated():
            text = words.of(message.token_ids)
            return f"turn {message.turn}, {len(message.token_ids) // 4} tokens, {message.finish}: {text}"
        case CodeFinished():
            return f"call {message.call}, {message.duration_s * 1000:.1f} ms: {words.result(message.outcome)}"
        case TurnRequested() | BatchReady():
            return ""
        case TrajectoryFinished():
            return f"{message.ending}, reward {message.reward:g}, {message.calls_failed}/{message.calls} calls failed"
        case _:
            fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
            left_out = (*_ARRAYS, "trajectory_id")
            return ", ".join(f"{name} {value}" for name, value in fields if name not in left_out)


def _told_of_lease(message: LeaseRequested | LeaseDeferred | LeaseGranted | LeaseParked | LeaseReleased) -> str:
    """Why it waits, for what, and for how long it did."""
    match message:
        case LeaseRequested():
            return (
                f"lease {message.lease}, for turn {message.turn}: it has {message.tokens} tokens "
                f"and may get {message.max_new_tokens} more"
            )
        case LeaseDeferred():
            return f"it waits: {message.reason}"
        case LeaseGranted():
            waited = f"after {message.waited_s:.3f} s" if message.waited_s else "at once"
            return (
                f"lease {message.lease}, {waited}: up to {message.tokens} tokens on {message.engine}: {message.reason}"
            )
        case LeaseParked():
            return f"a tool works for it, and its {message.tokens} tokens stay cached while there is room"
        case LeaseReleased():
            return f"it has ended with {message.tokens} tokens"
        case _:
            assert_never(message)


def texts(message: object, words: Words) -> Iterator[str]:
    """Every text in a message, those of its tokens too, and what the model read of an outcome."""
    if isinstance(message, str):
        yield message
    elif isinstance(message, msgspec.Struct):
        if isinstance(message, CodeFinished):
            yield words.result(message.outcome)
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if name in _IDS:
                yield words.of(value)
            else:
                yield from texts(value, words)
    elif isinstance(message, tuple | list):
        for part in message:
            yield from texts(part, words)


def excerpt(text: str, around: str = "") -> str:
    """One line of bounded length, of what is around some words in it."""
    line = text.replace("\n", "⏎")
    at = line.casefold().find(around.replace("\n", "⏎").casefold()) if around else 0
    start = max(0, at - _BEFORE) if at + len(around) > _EXCERPT else 0
    end = start + _EXCERPT
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")
