"""Tokenizes cold-start dialogues in the chat format of a model family, like rollouts with dialogue.renderer.

The prompt, the results and the texts of users have the tokens of a rollout. An assistant's turn has the tokens of the
family's template in a short dialogue: in a long dialogue, templates leave out the reasoning of earlier turns, which a
rollout keeps.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, cast
from unicodedata import normalize

from asterism.configs.errors import UnusableInput
from asterism.engine.data.data_files import RowFields
from asterism.engine.data.dialogue_calls import CallReader, DialogueCall
from asterism.engine.data.dialogue_messages import DialogueMessage
from asterism.engine.data.result_order import list_call_ids, order_results, require_no_calls
from asterism.engine.hf.family_renderer import CalledTool, FamilyRenderer, build_call_id, describe_tools
from asterism.policies.dialogue.call_blocks import iter_call_blocks, replace_call_blocks
from asterism.policies.dialogue.json_calls import JSON_CALLS

_QUESTION = {"role": "user", "content": "q"}
_RESULT = "r"
_PACKAGE_ERRORS = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError)


class TokenizedTurn(NamedTuple):
    is_trained: bool  # whether the assistant generates the turn
    token_ids: list[int]


class _Inexpressible(Exception):
    """A message that the format cannot express."""


class FamilyDialogues:
    """A tokenizer of dialogues of a task with dialogue.renderer."""

    def __init__(self, name: str, renderer: FamilyRenderer) -> None:
        """`name`: name of the family, for error messages."""
        self._name, self._renderer = name, renderer
        self._kept: set[tuple[bool, ...]] = set()  # kinds of turns that the format expresses completely

    @property
    def identity(self) -> str:
        """The settings that, with texts and tokenizer, determine the tokens."""
        return self._renderer.identity

    def tokenize(self, messages: Sequence[DialogueMessage], reader: CallReader) -> Iterator[TokenizedTurn]:
        """Yield tokenized turns. Raises DatasetError with the field of an unusable message, and UnicodeEncodeError."""
        turns = [list(group) for _, group in groupby(messages, key=lambda message: message.role)]
        row, token_ids, start, parts = _Row(self._renderer, reader), list[int](), 0, _NOTHING
        for turn, next_turn in zip(turns, [*turns[1:], []], strict=True):
            is_trained = turn[0].role == "assistant"
            try:
                if not token_ids:
                    added = self._render_prompt(turn[0], row)
                elif is_trained:
                    parts, start = row.read_parts(turn[0], parts), len(token_ids)
                    added = self._render_turn(parts, row, has_results=bool(next_turn) and next_turn[0].role == "tool")
                else:
                    added = self._render_others(turn, token_ids, start, parts, row)
            except _Inexpressible as error:
                raise turn[0].location.build_error(str(error)) from error
            except RecursionError as error:
                raise turn[0].location.build_error("nested too deeply") from error
            token_ids += added
            yield TokenizedTurn(is_trained, added)

    def _render_prompt(self, message: DialogueMessage, row: "_Row") -> list[int]:
        """Render the prompt. Only texts of the run are trusted; the row's own system text is not."""
        dialogue, mark = row.reader.dialogue, self._renderer.mark
        text = message.get_text().removeprefix(dialogue.instruction)
        system = dialogue.system if dialogue.system == self._renderer.dialogue.system else mark(dialogue.system)
        prompt = [{"role": "system", "content": system}] if system else []
        prompt.append({"role": "user", "content": dialogue.instruction + mark(text)})
        return self._render(prompt, row, opens=True)

    def _render_others(
        self,
        turn: Sequence[DialogueMessage],
        token_ids: list[int],
        start: int,
        before: "AssistantParts",
        row: "_Row",
    ) -> list[int]:
        """Render the results or the user's text after the turn at `start`."""
        if turn[0].role == "tool":
            messages = self._renderer.build_result_messages(before.called, order_results(turn, before.call_ids))
        else:
            require_no_calls(turn[0], before.call_ids)
            messages = [{"role": "user", "content": self._renderer.mark(turn[0].get_text())}]
        _require_unicode(messages)
        try:
            added = self._renderer.extend(token_ids, start, messages, row.tools)
        except _PACKAGE_ERRORS as error:
            raise _Inexpressible(f"{self._name}: {error}") from error
        if added is None:
            raise _Inexpressible(f"the format of {self._name} cannot continue after the previous turn")
        return added

    # ---------------------------------------------------------------- turns of the assistant

    def _render_turn(self, parts: "AssistantParts", row: "_Row", *, has_results: bool) -> list[int]:
        """Render the assistant's turn up to the token that ends it."""
        message = parts.build_message(self._renderer)
        following = self._renderer.build_result_messages(parts.called, [_RESULT] * len(parts.calls))
        given = following if has_results else []
        turn = self._cut_turn([message, *given], parts, row)
        self._require_kept(parts, message, turn, given, row)
        if not turn or turn[-1] not in self._renderer.stop_token_ids:
            followed = self._render([_QUESTION, message, *(following or [_QUESTION])], row)
            asked = len(self._render([_QUESTION], row))
            end = self._find_end(followed[asked:])
            if end is None:
                raise UnusableInput(f"{self._name}: no stop token ends a turn, so a cold start cannot train the end")
            turn = [*turn, followed[asked + end - 1]]
        names = [normalize("NFC", name) for name in self._renderer.read_called_names(self._open(row), turn, row.tools)]
        if parts.calls and names != [normalize("NFC", call.tool) for call in parts.calls]:
            raise _Inexpressible(
                f"a rollout in the format of {self._name} would read other calls in this turn: {names}"
            )
        return turn

    def _open(self, row: "_Row") -> list[int]:
        """Render a question and the start of the next turn, once per row, because schemas of tools can be long."""
        if not row.opened:
            row.opened += self._render([_QUESTION], row, opens=True)
        return row.opened

    def _cut_turn(self, messages: Sequence[Any], parts: "AssistantParts", row: "_Row") -> list[int]:
        """Return the tokens that a model generates, up to the first token that ends a turn."""
        opened = self._open(row)
        token_ids = self._render([_QUESTION, *messages], row)
        if token_ids[: len(opened)] != opened:
            start = self._renderer.decode(opened[len(self._render([_QUESTION], row)) :])
            remedy = "remove its reasoning" if parts.reasoning else "give it reasoning"
            raise _Inexpressible(
                f"the turn cannot follow {start!r}, the start of each turn of a rollout; {remedy}, or change "
                "dialogue.renderer_parameters"
            )
        turn = token_ids[len(opened) :]
        return turn[: self._find_end(turn)]

    def _require_kept(
        self, parts: "AssistantParts", message: RowFields, turn: list[int], following: Sequence[Any], row: "_Row"
    ) -> None:
        """Raise _Inexpressible if the format leaves out the reasoning, or a text before calls."""
        kind = (bool(parts.reasoning), bool(parts.text), bool(parts.calls), bool(following))
        if kind in self._kept:
            return
        for key, name in (("reasoning_content", "reasoning"), ("content", "text")):
            if message.get(key):
                rest = parts._replace(reasoning="") if name == "reasoning" else parts
                try:
                    lacking = self._cut_turn([{**message, key: ""}, *following], rest, row)
                except _Inexpressible:  # the format requires reasoning
                    continue
                if lacking == turn:
                    where = " before a call" if parts.calls else ""
                    raise _Inexpressible(f"the format of {self._name} has no place for the {name}{where}")
        self._kept.add(kind)

    def _find_end(self, token_ids: Sequence[int]) -> int | None:
        ends = (place for place, token_id in enumerate(token_ids, start=1) if token_id in self._renderer.stop_token_ids)
        return next(ends, None)

    def _render(self, messages: Sequence[Any], row: "_Row", *, opens: bool = False) -> list[int]:
        """Render messages. `opens`: append the start of the assistant's turn."""
        _require_unicode(messages)
        try:
            return self._renderer.render(messages, row.tools, add_generation_prompt=opens)
        except _PACKAGE_ERRORS as error:
            raise _Inexpressible(f"{self._name}: {error}") from error


NO_FAMILIES: Mapping[str, FamilyDialogues] = MappingProxyType({})


class AssistantParts(NamedTuple):
    """The parts of an assistant's turn. A blank text or reasoning is empty."""

    reasoning: str
    text: str
    calls: list[DialogueCall]
    num_earlier: int  # calls in earlier turns of the dialogue
    call_ids: list[str]  # id of each call in the row

    @property
    def called(self) -> list[CalledTool]:
        places = enumerate(self.calls, start=self.num_earlier)
        return [CalledTool(build_call_id(call.tool, place), call.tool) for place, call in places]

    def build_message(self, renderer: FamilyRenderer) -> RowFields:
        """Build the message; no part of it becomes a special token."""
        message: RowFields = {"role": "assistant", "content": renderer.mark(self.text)}
        if self.reasoning:
            message["reasoning_content"] = renderer.mark(self.reasoning)
        if self.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": renderer.mark(called.call_id),
                    "function": {
                        "name": renderer.mark(called.name),
                        "arguments": _mark_texts(call.arguments, renderer),
                    },
                }
                for called, call in zip(self.called, self.calls, strict=True)
            ]
        return message


_NOTHING = AssistantParts("", "", [], 0, [])


class _Row:
    """The shared state of a dialogue's turns. Only the schemas of the run's own tools are trusted."""

    def __init__(self, renderer: FamilyRenderer, reader: CallReader) -> None:
        """Prepare the schemas of the tools. Raises UnicodeEncodeError."""
        self.reader, self.opened = reader, list[int]()
        self.tools = describe_tools(reader.dialogue.tools)
        if reader.dialogue.tools is not renderer.dialogue.tools:
            self.tools = _mark_texts(self.tools, renderer)
        _require_unicode([self.tools])

    def read_parts(self, message: DialogueMessage, before: AssistantParts) -> AssistantParts:
        """Read a turn, which can end with JSON calls. `before`: the previous assistant's turn. Raises DatasetError."""
        reasoning, text = message.split_reasoning()
        calls: list[DialogueCall] = []
        can_call = self.reader.dialogue.tools or "<tools>" in self.reader.dialogue.system
        blocks = [block for block in iter_call_blocks(text, JSON_CALLS) if block.is_closed] if can_call else []
        if blocks:
            location = message.location._replace(field=f"{message.location.field}.content")
            first = blocks[0].start
            if replace_call_blocks(text[first:], JSON_CALLS, lambda block: "").strip():
                raise location.build_error("a text follows a call")
            for block in blocks:
                try:
                    call = json.loads(block.content)
                except (ValueError, RecursionError) as error:
                    raise location.build_error(f"{JSON_CALLS.opening} contains no JSON: {error}") from error
                calls.append(self.reader.read_call(call, location))
            text = text[:first].rstrip()
        given = [*calls, *self.reader.read_calls(message)]
        num_earlier = before.num_earlier + len(before.calls)
        reasoning, text = (each if each.strip() else "" for each in (reasoning, text))
        return AssistantParts(reasoning, text, given, num_earlier, list_call_ids(message, len(given)))


def _mark_texts(value: Any, renderer: FamilyRenderer) -> Any:
    """Mark all strings within a value of JSON."""
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
    """Raise UnicodeEncodeError for half of a surrogate pair, which no tokenizer accepts."""
    json.dumps(messages, ensure_ascii=False).encode()
