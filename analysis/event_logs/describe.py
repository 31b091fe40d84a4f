"""Describes an event in one line of text for `asterism log show` and `story`."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, assert_never

import msgspec

from asterism.bus.messages import (
    OPENING_CALL,
    AnswerGraded,
    AnyMessage,
    BatchReady,
    CodeFinished,
    CodeOutcome,
    EnvironmentOutcome,
    EnvironmentReturned,
    GroupAccepted,
    LeaseDeferred,
    LeaseGranted,
    LeasePaused,
    LeaseReleased,
    LeaseRequested,
    Observation,
    StartGroup,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
    bytes_to_ids,
)
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.chat_format import TextTokenizer
from asterism.policies.dialogue.dialogue_renderer import DialogueRenderer
from asterism.policies.dialogue.tool_results import format_result
from asterism.policies.rollout.call_transitions import format_environment_result
from asterism.policies.tools.task_description import TaskKind

_TOKEN_ID_FIELDS = ("token_ids", "prompt_ids")
_ARRAY_FIELDS = (*_TOKEN_ID_FIELDS, "loss_mask", "logprobs", "versions")
_MAX_EXCERPT_CHARACTERS = 240
_CHARACTERS_BEFORE_MATCH = 60  # part of the excerpt before the search text


class TaskTexts(NamedTuple):
    dialogue: DialogueConfig
    renderer: DialogueRenderer
    kind: TaskKind


class TextContext(NamedTuple):
    """Converts tokens and outcomes to the texts that the model generated and read.

    `texts` belongs to the task of the events; `tasks` holds the texts of all tasks by name.
    """

    tokenizer: TextTokenizer
    tasks: Mapping[str, TaskTexts]
    texts: TaskTexts

    def select_task(self, task: str) -> "TextContext":
        return self._replace(texts=self.tasks[task])

    @property
    def dialogue(self) -> DialogueConfig:
        return self.texts.dialogue

    def decode_tokens(self, token_ids: bytes) -> str:
        return self.tokenizer.decode(bytes_to_ids(token_ids))

    def format_result(self, outcome: CodeOutcome, code: str = "") -> str:
        return format_result(outcome, self.dialogue.result_characters, self.dialogue.result_format, code)


def describe(message: AnyMessage, context: TextContext, *, waited_s: float | None = None, code: str = "") -> str:
    """Describe the message's contents without the trajectory; texts are complete, with their line breaks.

    `waited_s` and `code` belong to a call that has ended, if they are known.
    """
    match message:
        case LeaseRequested() | LeaseDeferred() | LeaseGranted() | LeasePaused() | LeaseReleased():
            return _describe_lease(message)
        case StartGroup():
            problem = f"{message.problem}, truth {message.ground_truth!r}"
            prompt = context.decode_tokens(message.prompt_ids)
            return f"group {message.group_id}, {problem}, {message.size} siblings: {prompt}"
        case TurnGenerated():
            text = context.decode_tokens(message.token_ids)
            return f"turn {message.turn}, {len(message.token_ids) // 4} tokens, {message.finish}: {text}"
        case CodeFinished():
            times = _describe_times(message.duration_s, waited_s)
            return f"call {message.call}, {times}: {context.format_result(message.outcome, code)}"
        case EnvironmentReturned():
            name = "opening" if message.call == OPENING_CALL else f"call {message.call}"
            text = format_environment_result(message.outcome, context.dialogue.result_characters)
            return f"{name}, {_describe_times(message.duration_s, waited_s)}: {text}{_describe_values(message.outcome)}"
        case AnswerGraded():
            times = _describe_times(message.duration_s, waited_s)
            return f"{_describe_reward(message.reward, message.components)}, {times} on {message.executor}"
        case TurnRequested() | GroupAccepted() | BatchReady():
            return ""
        case TrajectoryFinished():
            reward = _describe_reward(message.reward, message.components)
            return f"{message.ending}, {reward}, {message.calls_failed}/{message.calls} calls failed"
        case _:
            return _describe_fields(message)


def _describe_values(outcome: EnvironmentOutcome) -> str:
    """List the rewards and metrics of a call."""
    if not isinstance(outcome, Observation):
        return ""
    values = {**outcome.rewards, **outcome.metrics}
    listed = "".join(f"\n({name} {value:g})" for name, value in values.items())
    return listed + ("\n(the trajectory ends)" if outcome.stop else "")


def _describe_times(duration_s: float, waited_s: float | None) -> str:
    waited = "" if waited_s is None else f"waited {waited_s:.3f} s, "
    return f"{waited}ran {duration_s * 1000:.1f} ms"


def _describe_fields(message: msgspec.Struct) -> str:
    left_out = (*_ARRAY_FIELDS, "trajectory_id")
    return ", ".join(
        f"{name.replace('_', ' ')} {_describe_value(getattr(message, name))}"
        for name in message.__struct_fields__
        if name not in left_out
    )


def _describe_value(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return f"({_describe_fields(value)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None or value == () else str(value)


def _describe_lease(message: LeaseRequested | LeaseDeferred | LeaseGranted | LeasePaused | LeaseReleased) -> str:
    """Describe the lease's size, reason and waiting time."""
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


def _describe_reward(reward: float, components: Mapping[str, float]) -> str:
    """Format the reward with its components, unless the only component is the whole reward."""
    parts = (
        ""
        if list(components.values()) == [reward]
        else ", ".join(f"{name} {value:g}" for name, value in components.items())
    )
    return f"reward {reward:g} ({parts})" if parts else f"reward {reward:g}"


def extract_texts(message: object, context: TextContext) -> Iterator[str]:
    """Yield every text in a message: strings, decoded tokens, and the outcome as the model reads it."""
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
    """Return one line of bounded length: the part of a long text around `around`."""
    line = text.replace("\n", "⏎")
    at = line.casefold().find(around.replace("\n", "⏎").casefold()) if around else 0
    start = max(0, at - _CHARACTERS_BEFORE_MATCH) if at + len(around) > _MAX_EXCERPT_CHARACTERS else 0
    end = start + _MAX_EXCERPT_CHARACTERS
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")
