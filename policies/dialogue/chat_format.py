"""Renders the dialogue's text: ChatML roles, protocol tags, tool schemas.

rStar2-Agent (arXiv 2508.20722, section 3): generation starts after a prefilled `<reason>`; a tool
call is JSON in `<tool_call>`, its result a `<tool_response>` in a user turn; the final answer is
in `<answer>` and `\\boxed{}`. The table [dialogue] may change all texts except the roles and the tags
of calls and results (docs/dialogue.md). asterism.policies.dialogue.parse_turn is the inverse.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from asterism.configs.dialogue_options import DialogueConfig
from asterism.policies.tools.python_tools import TOOL_SCHEMAS
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PROTOCOL_TAGS = (
    *("<reason>", "</reason>", "<answer>", "</answer>", "<tools>", "</tools>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)

_TOOLS_TAG = "<tools>"
_TOOLS = (
    "You may call one or more functions. Their signatures stand inside <tools> </tools>:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each call return a JSON object with the function's name and arguments inside <tool_call> </tool_call>:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
)


class DialogueFormat(msgspec.Struct, frozen=True):
    """The texts of a task's dialogues, from its table [dialogue] and its description."""

    tools: tuple[ToolSchema, ...]
    system: str  # with the schemas of the tools; empty: no system turn
    instruction: str  # before each question
    prefill: str  # of each assistant turn
    answer_open: str
    answer_close: str
    stop_tokens: tuple[str, ...]
    turn_separator: str  # after an assistant turn
    has_opening: bool = False  # the task's instance gives the first text of the user, with the question
    has_boxed_answer: bool = True  # see TaskDescription
    unclosed_call: str = "error"  # or "ignore"
    has_renderer: bool = False  # which adds the schemas of the tools


def build_dialogue_format(dialogue: DialogueConfig, description: TaskDescription) -> DialogueFormat:
    system, instruction = dialogue.system, dialogue.instruction
    answer = f"{dialogue.answer_open} {dialogue.answer_close}"
    python_tools = dialogue.tools if description.takes_tools else ()
    tools = (*(TOOL_SCHEMAS[tool] for tool in python_tools), *description.tools)
    if system == "default":
        system = _build_default_system(description, bool(tools), dialogue.renderer).replace("{answer}", answer)
    if instruction == "default":
        instruction = description.instruction.replace("{answer}", answer)
    schemas = "\n".join(tool.to_json() for tool in tools)
    return DialogueFormat(
        tools=tools,
        system=system.replace("{tools}", schemas),
        instruction=instruction,
        prefill=dialogue.turn_prefill,
        answer_open=dialogue.answer_open,
        answer_close=dialogue.answer_close,
        stop_tokens=dialogue.stop_tokens,
        turn_separator=dialogue.turn_separator,
        has_opening=description.has_instances,
        has_boxed_answer=description.has_boxed_answer,
        unclosed_call=dialogue.unclosed_call,
        has_renderer=bool(dialogue.renderer),
    )


def _build_default_system(description: TaskDescription, has_tools: bool, renderer: str) -> str:
    """A renderer adds the instructions for calls, and has its own tags for the reasoning."""
    system = description.system if has_tools else description.system_without_tools or description.system
    parts = (system, "" if renderer else description.tag_instruction)
    text = " ".join(filter(None, parts))
    calls = _TOOLS if has_tools and not renderer else ""
    return "\n\n".join(filter(None, (text, calls)))


def replace_prompt(dialogue: DialogueFormat, system: str, tools: Sequence[ToolSchema]) -> DialogueFormat:
    """The format of a dialogue with a system text and tools of its own, and without an instruction.

    It equals that of a task with these tools. A text that contains <tools> describes the tools itself.
    """
    schemas = "\n".join(tool.to_json() for tool in tools)
    has_instructions = _TOOLS_TAG in system or dialogue.has_renderer
    calls = _TOOLS.replace("{tools}", schemas) if tools and not has_instructions else ""
    text = "\n\n".join(filter(None, (system, calls)))
    return msgspec.structs.replace(dialogue, tools=tuple(tools), system=text, instruction="", has_opening=False)


class TextSegment(NamedTuple):
    """Only trusted text may become special tokens: a question or a tool's output may not."""

    text: str
    trusted: bool


class TextTokenizer(Protocol):
    def encode(self, text: str, *, trusted: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def encode_segments(tokenizer: TextTokenizer, segments: Iterable[TextSegment]) -> list[int]:
    return [token for segment in segments for token in tokenizer.encode(segment.text, trusted=segment.trusted)]


def build_prompt_segments(question: str, dialogue: DialogueFormat) -> list[TextSegment]:
    """System, user, and the start of the first assistant turn."""
    system = f"{TURN_START}system\n{dialogue.system}{TURN_END}\n" if dialogue.system else ""
    return [
        TextSegment(f"{system}{TURN_START}user\n{dialogue.instruction}", True),
        TextSegment(question, False),
        _build_assistant_start(dialogue),
    ]


def build_opening_segments(observation: str, dialogue: DialogueFormat) -> list[TextSegment]:
    """What follows the head of the prompt if the task has an opening: the first text of the user."""
    return [TextSegment(observation, False), _build_assistant_start(dialogue)]


def build_user_turn_segments(text: str, dialogue: DialogueFormat) -> list[TextSegment]:
    """A later turn of the user: from after the assistant's `<|im_end|>` to its next turn."""
    head = TextSegment(f"{dialogue.turn_separator}{TURN_START}user\n", True)
    return [head, TextSegment(text, False), _build_assistant_start(dialogue)]


def build_tool_turn_segments(results: Sequence[str], dialogue: DialogueFormat) -> list[TextSegment]:
    """From after the assistant's `<|im_end|>` to its next turn: one user turn with all results."""
    segments = [TextSegment(f"{dialogue.turn_separator}{TURN_START}user\n", True)]
    for number, result in enumerate(results):
        segments.append(TextSegment(("\n" if number else "") + "<tool_response>\n", True))
        segments.append(TextSegment(result, False))
        segments.append(TextSegment("\n</tool_response>", True))
    segments.append(_build_assistant_start(dialogue))
    return segments


def _build_assistant_start(dialogue: DialogueFormat) -> TextSegment:
    return TextSegment(f"{TURN_END}\n{TURN_START}assistant\n{dialogue.prefill}", True)


def format_tool_call(tool: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def build_call_instructions(schemas: str) -> str:
    """Follow the default system text. `schemas`: of the tools, a line each."""
    return _TOOLS.replace("{tools}", schemas)
