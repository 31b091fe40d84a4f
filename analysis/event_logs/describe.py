"""Describes an event in one line of text for `asterism log show` and `story`."""

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
    LeasePaused,
    LeaseReleased,
    LeaseRequested,
    StartGroup,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
    bytes_to_ids,
)
from configs.schema import DialogueConfig
from policies.dialogue.chat_format import TextTokenizer
from policies.dialogue.tool_results import format_result

_TOKEN_ID_FIELDS = ("token_ids", "prompt_ids")
_ARRAY_FIELDS = (*_TOKEN_ID_FIELDS, "loss_mask", "logprobs", "versions")
_MAX_EXCERPT_CHARACTERS = 240
_CHARACTERS_BEFORE_MATCH = 60  # part of the excerpt before the search text


class TextContext(NamedTuple):
    """Converts tokens and outcomes to the texts that the model generated and read."""

    tokenizer: TextTokenizer
    dialogue: DialogueConfig

    def decode_tokens(self, token_ids: bytes) -> str:
        return self.tokenizer.decode(bytes_to_ids(token_ids))

    def format_result(self, outcome: CodeOutcome) -> str:
        return format_result(outcome, self.dialogue.result_characters, self.dialogue.result_format)


def describe(message: AnyMessage, context: TextContext) -> str:
    """The message's contents without the trajectory; texts are complete, with their line breaks."""
    match message:
        case LeaseRequested() | LeaseDeferred() | LeaseGranted() | LeasePaused() | LeaseReleased():
            return _describe_lease(message)
        case StartGroup():
            return (
                f"group {message.group_id}, {message.problem}, truth {message.ground_truth!r}, {message.size} siblings"
            )
        case TurnGenerated():
            text = context.decode_tokens(message.token_ids)
            return f"turn {message.turn}, {len(message.token_ids) // 4} tokens, {message.finish}: {text}"
        case CodeFinished():
            return f"call {message.call}, {message.duration_s * 1000:.1f} ms: {context.format_result(message.outcome)}"
        case TurnRequested() | BatchReady():
            return ""
        case TrajectoryFinished():
            return f"{message.ending}, reward {message.reward:g}, {message.calls_failed}/{message.calls} calls failed"
        case _:
            fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
            left_out = (*_ARRAY_FIELDS, "trajectory_id")
            return ", ".join(f"{name} {value}" for name, value in fields if name not in left_out)


def _describe_lease(message: LeaseRequested | LeaseDeferred | LeaseGranted | LeasePaused | LeaseReleased) -> str:
    """The lease's size, reason and waiting time."""
    match message:
        case LeaseRequested():
            return (
                f"lease {message.lease} for turn {message.turn}: {message.tokens} tokens, "
                f"at most {message.max_new_tokens} more"
            )
        case LeaseDeferred():
            return f"waits: {message.reason}"
        case LeaseGranted():
            waited = f"after {message.waited_s:.3f} s" if message.waited_s else "without waiting"
            return (
                f"lease {message.lease} {waited}: up to {message.tokens} tokens on {message.engine}: {message.reason}"
            )
        case LeasePaused():
            return f"during its tool call {message.tokens} tokens stay cached unless evicted"
        case LeaseReleased():
            return f"ended with {message.tokens} tokens"
        case _:
            assert_never(message)


def extract_texts(message: object, context: TextContext) -> Iterator[str]:
    """Every text in a message: strings, decoded tokens, and the outcome as the model reads it."""
    if isinstance(message, str):
        yield message
    elif isinstance(message, msgspec.Struct):
        if isinstance(message, CodeFinished):
            yield context.format_result(message.outcome)
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if name in _TOKEN_ID_FIELDS:
                yield context.decode_tokens(value)
            else:
                yield from extract_texts(value, context)
    elif isinstance(message, tuple | list):
        for part in message:
            yield from extract_texts(part, context)


def make_excerpt(text: str, around: str = "") -> str:
    """One line of bounded length; a long text is cut around `around`."""
    line = text.replace("\n", "⏎")
    at = line.casefold().find(around.replace("\n", "⏎").casefold()) if around else 0
    start = max(0, at - _CHARACTERS_BEFORE_MATCH) if at + len(around) > _MAX_EXCERPT_CHARACTERS else 0
    end = start + _MAX_EXCERPT_CHARACTERS
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")
