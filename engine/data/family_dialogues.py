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
from engine.data.dialogue_messages import DatasetLocation, DialogueMessage
from engine.model.family_renderer import FamilyRenderer, describe_tools

_QUESTION = {"role": "user", "content": "q"}
_RESULT = "r"
_PACKAGE_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


class TokenizedTurn(NamedTuple):
    is_trained: bool  # the assistant generates it
    token_ids: list[int]


class FamilyDialogues:
    """Tokenizes the dialogues of a task with dialogue.renderer."""

    def __init__(self, name: str, renderer: FamilyRenderer) -> None:
        """`name`: of the family, for error messages."""
        self._name, self._renderer = name, renderer
        self._checked: set[tuple[bool, bool, bool]] = set()  # kinds of turns of which the format keeps everything

    @property
    def identity(self) -> str:
        """What determines the tokens besides the texts and the tokenizer."""
        return self._renderer.identity

    def tokenize(self, messages: Sequence[DialogueMessage], reader: CallReader) -> Iterator[TokenizedTurn]:
        """Raises DatasetError with the field of an unusable message, and UnicodeEncodeError."""
        tools = describe_tools(reader.dialogue.tools)
        turns = [(role, list(group)) for role, group in groupby(messages, key=lambda message: message.role)]
        token_ids = self._render_prompt(messages[0], reader, tools)
        yield TokenizedTurn(False, list(token_ids))
        start, called = 0, list[str]()
        for place, (role, group) in enumerate(turns[1:], start=2):
            if role == "assistant":
                start, calls = len(token_ids), _read_turn(group[0], reader)
                called = [call.tool for call in calls.calls]
                has_results = place < len(turns) and turns[place][0] == "tool"
                added = self._render_turn(calls, group[0].location, tools, has_results=has_results)
            else:
                added = self._render_others(group, token_ids, start, called, tools)
            token_ids += added
            yield TokenizedTurn(role == "assistant", added)

    def _render_prompt(self, message: DialogueMessage, reader: CallReader, tools: Any) -> list[int]:
        """Only the system text of a row is untrusted."""
        dialogue, mark = reader.dialogue, self._renderer.mark
        text = message.get_text().removeprefix(dialogue.instruction)
        system = dialogue.system if dialogue.system == self._renderer.dialogue.system else mark(dialogue.system)
        prompt = [{"role": "system", "content": system}] if system else []
        prompt.append({"role": "user", "content": dialogue.instruction + mark(text)})
        return self._render(prompt, tools, message.location, add_generation_prompt=True)

    def _render_others(
        self, group: Sequence[DialogueMessage], token_ids: list[int], start: int, called: Sequence[str], tools: Any
    ) -> list[int]:
        """What follows the turn at `start`, which called these tools: results, or a text of the user."""
        if group[0].role == "tool":
            results = chain.from_iterable(message.get_results() for message in group)
            messages = self._renderer.build_result_messages(called, list(results))
        else:
            messages = [{"role": "user", "content": self._renderer.mark(group[0].get_text())}]
        _require_unicode(messages)
        try:
            added = self._renderer.extend(token_ids, start, messages, tools)
        except _PACKAGE_ERRORS as error:
            raise group[0].location.build_error(f"{self._name}: {error}") from error
        if added is None:
            raise group[0].location.build_error(f"the format of {self._name} cannot continue after this turn")
        return added

    def _render_turn(
        self, turn: "AssistantParts", location: DatasetLocation, tools: Any, *, has_results: bool
    ) -> list[int]:
        """Up to the token that ends the turn."""
        message = turn.build_message(self._renderer)
        results = self._renderer.build_result_messages([], [_RESULT] * len(turn.calls)) if has_results else []
        token_ids = self._render_after_question([message, *results], tools, location)
        if turn.kind not in self._checked:
            self._require_kept(turn, message, location, tools)
            self._checked.add(turn.kind)
        if (end := self._find_end(token_ids)) is not None:
            return token_ids[:end]
        return [*token_ids, self._find_closing_token(turn, location, tools)]

    def _require_kept(self, turn: "AssistantParts", message: RowFields, location: DatasetLocation, tools: Any) -> None:
        """Raise DatasetError if the format leaves out the reasoning, or a text before calls."""
        whole = self._render([_QUESTION, message], tools, location)
        for key, field in (("reasoning_content", "reasoning"), ("content", "text")):
            if message.get(key) and self._render([_QUESTION, {**message, key: ""}], tools, location) == whole:
                where = " before a call" if turn.calls else ""
                raise location.build_error(f"the format of {self._name} has no place for the {field}{where}")

    def _find_end(self, token_ids: Sequence[int]) -> int | None:
        ends = (place for place, token_id in enumerate(token_ids, start=1) if token_id in self._renderer.stop_token_ids)
        return next(ends, None)

    def _find_closing_token(self, turn: "AssistantParts", location: DatasetLocation, tools: Any) -> int:
        """In formats that end a turn with the role of the next one."""
        message = turn.build_message(self._renderer)
        following = self._renderer.build_result_messages([], [_RESULT] * len(turn.calls)) or [_QUESTION]
        token_ids = self._render([_QUESTION, message, *following], tools, location)
        before = len(self._render([_QUESTION], tools, location))
        if (end := self._find_end(token_ids[before:])) is None:
            raise UnusableInput(f"{self._name}: no stop token ends a turn, so that a cold start cannot teach it")
        return token_ids[before + end - 1]

    def _render_after_question(self, messages: Sequence[Any], tools: Any, location: DatasetLocation) -> list[int]:
        """The tokens that follow the start of the assistant's turn in a rollout."""
        opened = self._render([_QUESTION], tools, location, add_generation_prompt=True)
        token_ids = self._render([_QUESTION, *messages], tools, location)
        if token_ids[: len(opened)] != opened:
            asked = len(self._render([_QUESTION], tools, location))
            has_reasoning = bool(messages[0].get("reasoning_content"))
            remedy = "remove its reasoning" if has_reasoning else "give it reasoning"
            raise location.build_error(
                f"the turn cannot follow {self._renderer.decode(opened[asked:])!r}, the start of each turn of a rollout; "
                f"{remedy}, or change dialogue.renderer_parameters"
            )
        return token_ids[len(opened) :]

    def _render(
        self, messages: Sequence[Any], tools: Any, location: DatasetLocation, *, add_generation_prompt: bool = False
    ) -> list[int]:
        _require_unicode(messages)
        try:
            return self._renderer.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except _PACKAGE_ERRORS as error:
            raise location.build_error(f"{self._name}: {error}") from error


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


def _read_turn(message: DialogueMessage, reader: CallReader) -> AssistantParts:
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
