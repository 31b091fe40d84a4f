"""Renders dialogues in the chat format of a model family, with the package renderers.

The package appends each turn to the tokens that the model generated and never encodes them again: a rollout's tokens
only grow. `thinking_retention` is "all", so that the reasoning of earlier turns stays in the prompt, although some
templates remove it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from asterism.bus.messages import TokenRecord, bytes_to_ids
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.policies.dialogue.parse_turn import (
    AssistantTurn,
    MalformedCall,
    ToolCall,
    build_assistant_turn,
    check_call,
)
from asterism.policies.tools.tool_schema import ToolSchema

if TYPE_CHECKING:
    from renderers.base import ParsedResponse, ParsedToolCall, Renderer

_MARK = "\ue0f0\ue0f1"  # private-use characters that split the text of an added token: it remains ordinary text
_CACHED_TEXTS = 64
_MAX_CACHED_CHARACTERS = 131_072
_RETENTION = {"thinking_retention": "all"}
# template parameters that keep the reasoning of earlier turns, as the run does
_KEEPING = {
    **{"preserve_thinking": True, "preserved_thinking": True},
    **{"clear_thinking": False, "truncate_history_thinking": False, "drop_thinking": False},
}
_UNUSABLE = ("auto", "default")  # "auto" needs a model's name, "default" cannot continue a dialogue


class CalledTool(NamedTuple):
    call_id: str
    name: str


def build_call_id(name: str | None, place: int) -> str:
    """Return the id of a call in the form that Kimi renders instead of the name. `place`: the call's index, from 0."""
    return f"functions.{name}:{place}"


class FamilyTokenizer:
    """An implementation of renderers.base.Tokenizer. Marked texts do not become added tokens."""

    unk_token_id = None
    eos_token_id = None

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = str(tokenizer.path.parent)
        self.added = tokenizer.added_tokens
        texts = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(re.escape(text) for text in texts) + ")")
        # All dialogues contain the same roles and schemas of tools.
        self._encode_cached = lru_cache(_CACHED_TEXTS)(self._encode)

    def mark(self, text: str) -> str:
        return self._pattern.sub(lambda found: found[0][0] + _MARK + found[0][1:], text)

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        return list(self._encode_cached(text)) if len(text) < _MAX_CACHED_CHARACTERS else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if _MARK not in text:
            return self._tokenizer.encode(text, trusted=True)
        token_ids: list[int] = []
        for part in self._pattern.split(text):
            trusted = part in self.added
            token_ids += self._tokenizer.encode(part.replace(_MARK, ""), trusted=trusted)
        return token_ids

    def decode(self, token_ids: Any, *_: object, **__: object) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.find_token_id(tokens)
        return [self._tokenizer.find_token_id(token) for token in tokens]


class FamilyRenderer:
    """An implementation of asterism.policies.dialogue.dialogue_renderer.DialogueRenderer."""

    def __init__(
        self,
        renderer: "Renderer",
        tokenizer: FamilyTokenizer,
        dialogue: DialogueFormat,
        identity: str,
        template_parameters: Mapping[str, Any],
    ) -> None:
        """`identity` names package, renderer and parameters. The chat template also has `template_parameters`."""
        self._renderer, self._tokenizer, self.dialogue = renderer, tokenizer, dialogue
        self.identity, self.template_parameters = identity, template_parameters
        self._tools = describe_tools(dialogue.tools)
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())
        self._empty_prompt = self._render_dialogue("")
        self._head = self._find_head()

    def render_prompt(self, question: str) -> list[int]:
        return self._head if self.dialogue.has_opening else self._render_dialogue(question)

    def render_opening(self, observation: str) -> list[int]:
        token_ids = self._render_dialogue(observation)
        assert token_ids[: len(self._head)] == self._head
        return token_ids[len(self._head) :]

    def render_user_turn(self, record: TokenRecord, text: str) -> list[int] | None:
        return self._extend(record, [{"role": "user", "content": self.mark(text)}])

    def render_tool_turn(self, record: TokenRecord, results: Sequence[str]) -> list[int] | None:
        calls = enumerate(self._parse(record.token_ids, _find_last_turn(record)).tool_calls)
        called = [CalledTool(call.id or build_call_id(call.name, place), call.name or "") for place, call in calls]
        return self._extend(record, self.build_result_messages(called, results))

    def build_result_messages(self, called: Sequence["CalledTool"], results: Sequence[str]) -> list[dict[str, str]]:
        """Return a message for each result. There can be fewer calls than results."""
        calls = [*called, *(CalledTool(build_call_id("", place), "") for place in range(len(called), len(results)))]
        return [
            {
                "role": "tool",
                "tool_call_id": self.mark(call.call_id),
                "name": self.mark(call.name),
                "content": self.mark(result),
            }
            for call, result in zip(calls, results, strict=False)
        ]

    def read_called_names(self, prompt_ids: list[int], turn_ids: list[int], tools: Any) -> list[str]:
        """Return the names of the called tools, as a rollout parses the turn."""
        parsed = self._renderer.parse_response(turn_ids, tools=tools, prompt_ids=prompt_ids)
        return [call.name or "" for call in parsed.tool_calls]

    def mark(self, text: str) -> str:
        """Mark the text so that no part of it becomes a special token."""
        return self._tokenizer.mark(text)

    def render(self, messages: Sequence[Any], tools: Any, *, add_generation_prompt: bool = False) -> list[int]:
        """Render a whole dialogue like the family's template. `tools`: see `describe_tools`. Raises package errors."""
        return self._renderer.render_ids(list(messages), tools=tools, add_generation_prompt=add_generation_prompt)

    def extend(self, token_ids: list[int], turn_start: int, messages: Sequence[Any], tools: Any) -> list[int] | None:
        """Return the tokens of the messages after the turn at `turn_start`, up to the next turn.

        Returns None if the format cannot continue the dialogue. Raises the package's errors.
        """
        before, turn = token_ids[:turn_start], token_ids[turn_start:]
        extended = self._renderer.bridge_to_next_turn(before, turn, list(messages), tools=tools)
        if extended is None or extended.token_ids[: len(token_ids)] != token_ids:
            return None
        return extended.token_ids[len(token_ids) :]

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def parse_turn(self, token_ids: bytes, turn_start: int) -> AssistantTurn:
        parsed = self._parse(token_ids, turn_start)
        tools = self.dialogue.tools
        calls = tuple(_check_parsed_call(call, tools) for call in parsed.tool_calls) if tools else ()
        return build_assistant_turn(parsed.content, calls, self.dialogue)

    def decode_content(self, token_ids: bytes, turn_start: int) -> str:
        return self._parse(token_ids, turn_start).content

    def decode_response(self, record: TokenRecord) -> str:
        return self._tokenizer.decode(bytes_to_ids(record.token_ids)[record.prompt_tokens :])

    def _parse(self, token_ids: bytes, turn_start: int) -> "ParsedResponse":
        """Parse a turn. Without a prompt, an empty prompt precedes the turn, which can begin within the reasoning."""
        ids = bytes_to_ids(token_ids)
        prompt_ids = list(ids[:turn_start]) or self._empty_prompt
        return self._renderer.parse_response(list(ids[turn_start:]), tools=self._tools, prompt_ids=prompt_ids)

    def _extend(self, record: TokenRecord, messages: list[dict[str, str]]) -> list[int] | None:
        return self.extend(list(bytes_to_ids(record.token_ids)), _find_last_turn(record), messages, self._tools)

    def _render_dialogue(self, question: str) -> list[int]:
        """Render the system turn, the user turn, and the start of the first assistant turn."""
        system = [{"role": "system", "content": self.dialogue.system}] if self.dialogue.system else []
        user = {"role": "user", "content": self.dialogue.instruction + self.mark(question)}
        return self.render([*system, user], self._tools, add_generation_prompt=True)

    def _find_head(self) -> list[int]:
        """Return the tokens that all prompts share, up to the last added token before the question."""
        token_ids, others = self._render_dialogue("a"), self._render_dialogue("\n\nb")
        same = next(place for place, pair in enumerate(zip(token_ids, others, strict=False)) if pair[0] != pair[1])
        added = set(self._tokenizer.added.values())
        while same and token_ids[same - 1] not in added:
            same -= 1
        return token_ids[:same]


def build_family_renderer(config: DialogueConfig, dialogue: DialogueFormat, tokenizer: FastTokenizer) -> FamilyRenderer:
    """Build the renderer. Raises UnusableInput for a missing package, renderer or token, or a wrong parameter."""
    try:
        from pydantic import TypeAdapter, ValidationError
        from renderers import create_renderer
        from renderers.configs import RendererConfig
    except ImportError as error:
        raise UnusableInput(f"{error}; install the extra: pip install 'asterism[renderers]'") from None
    if config.renderer in _UNUSABLE:
        raise UnusableInput(
            f'"{config.renderer}" cannot continue a dialogue; name the model\'s family, such as "qwen3"'
        )
    if _RETENTION.keys() & config.renderer_parameters.keys():
        raise UnusableInput('renderer_parameters.thinking_retention is always "all"; remove it')
    keys = {**config.renderer_parameters, **_RETENTION, "name": config.renderer}
    try:
        checked = TypeAdapter[Any](RendererConfig).validate_python(keys)
    except ValidationError as error:
        found = "; ".join(_describe_problem(each) for each in error.errors())
        raise UnusableInput(f"{config.renderer}: {found}") from None
    family_tokenizer = FamilyTokenizer(tokenizer)
    try:
        renderer = create_renderer(family_tokenizer, checked)
        identity = f"renderers {version('renderers')} {checked.model_dump_json()}"
        return FamilyRenderer(renderer, family_tokenizer, dialogue, identity, _list_template_parameters(checked))
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise UnusableInput(f"{config.renderer} does not fit {tokenizer.path}: {error}") from None


def _list_template_parameters(config: Any) -> dict[str, Any]:
    """Return the parameters with values. The defaults of package and template can differ, such as today's date."""
    values = {name: getattr(config, name) for name in sorted(config.template_field_names())}
    values |= {name: _KEEPING[name] for name in values.keys() & _KEEPING.keys() - config.model_fields_set}
    return {name: value for name, value in values.items() if value is not None}


def _describe_problem(problem: Any) -> str:
    place = ".".join(map(str, problem["loc"][1:]))
    return f"renderer_parameters.{place}: {problem['msg']}" if place else problem["msg"]


def _find_last_turn(record: TokenRecord) -> int:
    return record.loss_mask.rfind(b"\0") + 1


def describe_tools(tools: Sequence[ToolSchema]) -> Any:
    """Return the tools in the form that the package takes, or None without tools."""
    functions = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools]
    return [{"type": "function", "function": function} for function in functions] or None


def _check_parsed_call(call: "ParsedToolCall", tools: Sequence[ToolSchema]) -> ToolCall | MalformedCall:
    if call.status in ("ok", "unknown_tool"):
        return check_call(call.name, call.arguments, tools)
    return MalformedCall(f"the call cannot be parsed: {str(call.status).replace('_', ' ')}")
