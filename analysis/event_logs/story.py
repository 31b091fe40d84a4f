"""Describes the events of one trajectory in the order of time, with every text that the model read.

A call that cannot run, such as invalid JSON, has no event in the log, because no executor received
it: the call and its result are derived from the generated text. A call or a grading waits in queues
from the event that caused it until its execution.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asterism.analysis.event_logs.describe import TextContext, describe
from asterism.analysis.event_logs.merged_events import MergedEvent
from asterism.bus.messages import (
    OPENING_CALL,
    AnswerGraded,
    AnyMessage,
    CallFailed,
    CodeFinished,
    EnvironmentReturned,
    StartGroup,
    TurnGenerated,
)
from asterism.policies.dialogue.parse_turn import ToolCall
from asterism.policies.rollout.call_transitions import format_refusal, select_calls
from asterism.policies.rollout.trajectory import GRADING_CALL
from asterism.policies.tools.python_tools import build_program


class StoryLine(NamedTuple):
    at_s: float  # seconds since the first event
    actor: str
    kind: str
    text: str


def tell_story(events: Iterable[MergedEvent], context: TextContext) -> Iterator[StoryLine]:
    teller = _StoryTeller(context)
    start_time = None
    for logged in events:
        start_time = logged.event.time if start_time is None else start_time
        for kind, text in teller.describe_event(logged.envelope.message, logged.event.time):
            yield StoryLine(logged.event.time - start_time, logged.event.actor, kind, text)


class _StoryTeller:
    """The state of a story: the current turn and its calls."""

    def __init__(self, context: TextContext) -> None:
        self._context = context
        self._forget_calls()

    def _forget_calls(self) -> None:
        self._turn_tokens = b""  # tokens of the current turn, which may take several leases
        self._num_calls = 0  # number of calls in earlier turns
        self._calls: dict[int, ToolCall] = {}  # calls of the last turn, by number
        self._requested_at: dict[int, float] = {}  # time of each call's request, by number of the call

    def describe_event(self, message: AnyMessage, at: float) -> Iterator[tuple[str, str]]:
        """Yield the kind and the text of each line."""
        waited_s, code = None, ""
        match message:
            case StartGroup():
                self._forget_calls()
                self._context = self._context.select_task(message.task)
                self._requested_at[OPENING_CALL] = at
            case EnvironmentReturned(call=number):
                waited_s = self._compute_wait(number, at, message.duration_s)
            case CodeFinished(call=number):
                waited_s = self._compute_wait(number, at, message.duration_s)
                call = self._calls.get(number)
                code = "" if call is None else build_program(call.tool, call.arguments).code
            case AnswerGraded():
                waited_s = self._compute_wait(GRADING_CALL, at, message.duration_s)
            case CallFailed(call=number):
                self._requested_at[number] = at  # time of the retry
            case _:
                pass
        yield type(message).__name__, describe(message, self._context, waited_s=waited_s, code=code)
        if isinstance(message, TurnGenerated):
            yield from self._describe_refused_calls(message, at)

    def _compute_wait(self, number: int, at: float, duration_s: float) -> float | None:
        requested_at = self._requested_at.get(number)
        return None if requested_at is None else max(0.0, at - requested_at - duration_s)

    def _describe_refused_calls(self, turn: TurnGenerated, at: float) -> Iterator[tuple[str, str]]:
        """Yield the results of the calls of this turn that cannot run."""
        self._turn_tokens += turn.token_ids
        if turn.finish != "stop":
            return
        texts = self._context.texts
        if texts.kind == "dialogue":  # each turn is a call
            self._turn_tokens, self._requested_at = b"", dict.fromkeys((GRADING_CALL, turn.turn), at)
            return
        calls = select_calls(texts.dialogue, texts.renderer.parse_turn(self._turn_tokens, 0).calls)
        first, self._turn_tokens, self._num_calls = self._num_calls, b"", self._num_calls + len(calls)
        self._calls = {first + place: call for place, call in enumerate(calls) if isinstance(call, ToolCall)}
        self._requested_at = dict.fromkeys((GRADING_CALL, *self._calls), at)
        if turn.turn + 1 >= texts.dialogue.max_turns:
            return  # the trajectory ends without the results
        for place, call in enumerate(calls):
            refusal = format_refusal(texts.dialogue, place, call)
            if refusal is not None:
                yield "(result)", f"call {first + place}, not run: {refusal}"
