"""Cold-start dialogues in the chat format of a model family, with the token ids of a rollout with dialogue.renderer.

The prompt is that of a rollout, and results and users follow a turn as in a rollout. The turns of the assistant are those of
the family's template in a short dialogue: in a long one, templates leave out the reasoning of earlier turns, which a rollout
keeps.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from configs.errors import UnusableInput
from engine.data.data_files import RowFields
from engine.data.dialogue_calls import CALL_IN_TEXT, CallReader, DialogueCall
from engine.data.dialogue_messages import DialogueMessage
from engine.model.family_renderer import FamilyRenderer, describe_tools

_QUESTION = {"role": "user", "content": "q"}
_RESULT = "r"
_PACKAGE_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


class TokenizedTurn(NamedTuple):
    is_trained: bool  # the assistant generates it
    token_ids: list[int]


class _Inexpressible(Exception):
    """The format cannot express a message."""


class FamilyDialogues:
    """Tokenizes the dialogues of a task with dialogue.renderer."""

    def __init__(self, name: str, renderer: FamilyRenderer) -> None:
        """`name`: of the family, for error messages."""
        self._name, self._renderer = name, renderer
        self._kept: set[tuple[bool, bool, bool]] = set()  # kinds of turns of which the format leaves out nothing

    @property
    def identity(self) -> str:
        """What determines the tokens besides the texts and the tokenizer."""
        return self._renderer.identity

    def tokenize(self, messages: Sequence[DialogueMessage], reader: CallReader) -> Iterator[TokenizedTurn]:
        """Raises DatasetError with the field of an unusable message, and UnicodeEncodeError."""
        tools = describe_tools(reader.dialogue.tools)
        turns = [list(group) for _, group in groupby(messages, key=lambda message: message.role)]
        token_ids, start, called = list[int](), 0, list[str]()
        for turn, next_turn in zip(turns, [*turns[1:], []], strict=True):
            is_trained = turn[0].role == "assistant"
            try:
                if not token_ids:
                    added = self._render_prompt(turn[0], reader, tools)
                elif is_trained:
                    parts = _read_parts(turn[0], reader)
                    start, called = len(token_ids), [call.tool for call in parts.calls]
                    has_results = bool(next_turn) and next_turn[0].role == "tool"
                    added = self._render_turn(parts, tools, has_results=has_results)
                else:
                    added = self._render_others(turn, token_ids, start, called, tools)
            except _Inexpressible as error:
                raise turn[0].location.build_error(str(error)) from error
            token_ids += added
            yield TokenizedTurn(is_trained, added)

    def _render_prompt(self, message: DialogueMessage, reader: CallReader, tools: Any) -> list[int]:
        """A row's own system text is untrusted, as all texts but those of the run."""
        dialogue, mark = reader.dialogue, self._renderer.mark
        text = message.get_text().removeprefix(dialogue.instruction)
        system = dialogue.system if dialogue.system == self._renderer.dialogue.system else mark(dialogue.system)
        prompt = [{"role": "system", "content": system}] if system else []
        return self._render(
            [*prompt, {"role": "user", "content": dialogue.instruction + mark(text)}], tools, opens=True
        )

    def _render_others(
        self, turn: Sequence[DialogueMessage], token_ids: list[int], start: int, called: Sequence[str], tools: Any
    ) -> list[int]:
        """What follows the turn at `start`, which called these tools: results, or a text of the user."""
        if turn[0].role == "tool":
            results = chain.from_iterable(message.get_results() for message in turn)
            messages = self._renderer.build_result_messages(called, list(results))
        else:
            messages = [{"role": "user", "content": self._renderer.mark(turn[0].get_text())}]
        _require_unicode(messages)
        try:
            added = self._renderer.extend(token_ids, start, messages, tools)
        except _PACKAGE_ERRORS as error:
            raise _Inexpressible(f"{self._name}: {error}") from error
        if added is None:
            raise _Inexpressible(f"the format of {self._name} cannot continue after the turn before")
        return added

    # ---------------------------------------------------------------- turns of the assistant

    def _render_turn(self, parts: "AssistantParts", tools: Any, *, has_results: bool) -> list[int]:
        """Up to the token that ends the turn."""
        message = parts.build_message(self._renderer)
        results = self._renderer.build_result_messages([], [_RESULT] * len(parts.calls))
        opened = self._render([_QUESTION], tools, opens=True)
        token_ids = self._render([_QUESTION, message, *(results if has_results else [])], tools)
        if token_ids[: len(opened)] != opened:
            raise _Inexpressible(self._explain_opening(parts, opened, tools))
        if parts.kind not in self._kept:
            self._require_kept(parts, message, tools)
            self._kept.add(parts.kind)
        turn = token_ids[len(opened) :]
        if (end := self._find_end(turn)) is not None:
            return turn[:end]
        followed = self._render([_QUESTION, message, *(results or [_QUESTION])], tools)
        if (end := self._find_end(followed[len(self._render([_QUESTION], tools)) :])) is None:
            raise UnusableInput(f"{self._name}: no stop token ends a turn, so that a cold start cannot teach it")
        return [*turn, followed[len(self._render([_QUESTION], tools)) + end - 1]]

    def _explain_opening(self, parts: "AssistantParts", opened: list[int], tools: Any) -> str:
        text = self._renderer.decode(opened[len(self._render([_QUESTION], tools)) :])
        remedy = "remove its reasoning" if parts.reasoning else "give it reasoning"
        turn = f"the turn cannot follow {text!r}, the start of each turn of a rollout"
        return f"{turn}; {remedy}, or change dialogue.renderer_parameters"

    def _require_kept(self, parts: "AssistantParts", message: RowFields, tools: Any) -> None:
        """Raise _Inexpressible if the format leaves out the reasoning, or a text before calls."""
        whole = self._render([_QUESTION, message], tools)
        for key, name in (("reasoning_content", "reasoning"), ("content", "text")):
            if message.get(key) and self._render([_QUESTION, {**message, key: ""}], tools) == whole:
                where = " before a call" if parts.calls else ""
                raise _Inexpressible(f"the format of {self._name} has no place for the {name}{where}")

    def _find_end(self, token_ids: Sequence[int]) -> int | None:
        ends = (place for place, token_id in enumerate(token_ids, start=1) if token_id in self._renderer.stop_token_ids)
        return next(ends, None)

    def _render(self, messages: Sequence[Any], tools: Any, *, opens: bool = False) -> list[int]:
        """`opens`: with the start of the assistant's turn."""
        _require_unicode(messages)
        try:
            return self._renderer.render(messages, tools, add_generation_prompt=opens)
        except _PACKAGE_ERRORS as error:
            raise _Inexpressible(f"{self._name}: {error}") from error


NO_FAMILIES: Mapping[str, FamilyDialogues] = MappingProxyType({})


class AssistantParts(NamedTuple):
    """The parts of an assistant's turn."""

    reasoning: str
    text: str
    calls: list[DialogueCall]

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        return bool(self.reasoning), bool(self.text), bool(self.calls)

    def build_message(self, renderer: FamilyRenderer) -> RowFields:
        """In which nothing becomes a special token."""
        message: RowFields = {"role": "assistant", "content": renderer.mark(self.text)}
        if self.reasoning:
            message["reasoning_content"] = renderer.mark(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": f"call_{place}",
                    "function": {"name": call.tool, "arguments": _mark_texts(call.arguments, renderer)},
                }
                for place, call in enumerate(self.calls)
            ]
        return message


def _read_parts(message: DialogueMessage, reader: CallReader) -> AssistantParts:
    """Calls may stand at the end of the text. Raises DatasetError."""
    reasoning, text = message.split_reasoning()
    calls: list[DialogueCall] = []
    can_call = reader.dialogue.tools or "<tools>" in reader.dialogue.system
    if can_call and (first := CALL_IN_TEXT.search(text)):
        location = message.location._replace(field=f"{message.location.field}.content")
        if CALL_IN_TEXT.sub("", text[first.start() :]).strip():
            raise location.build_error("a text follows a call")
        for found in CALL_IN_TEXT.finditer(text):
            try:
                call = json.loads(found[1])
            except (ValueError, RecursionError) as error:
                raise location.build_error(f"<tool_call> contains no JSON: {error}") from error
            calls.append(reader.read_call(call, location))
        text = text[: first.start()].rstrip()
    return AssistantParts(reasoning, text, [*calls, *reader.read_calls(message)])


def _mark_texts(value: Any, renderer: FamilyRenderer) -> Any:
    """All strings within a value of JSON."""
    match value:
        case str():
            return renderer.mark(value)
        case list():
            return [_mark_texts(each, renderer) for each in cast(list[Any], value)]
        case dict():
            return {renderer.mark(key): _mark_texts(each, renderer) for key, each in cast(RowFields, value).items()}
        case _:
            return value


def _require_unicode(messages: Sequence[Any]) -> None:
    """Raises UnicodeEncodeError for half of a character, which no tokenizer takes."""
    json.dumps(messages, ensure_ascii=False).encode()
