"""Renders the dialogue's text: ChatML roles, protocol tags, tool schemas.

rStar2-Agent (arXiv 2508.20722, section 3): generation starts after a prefilled `<reason>`; a tool
call has a form of CALL_FORMATS, its result is a `<tool_response>` in a user turn; the final answer
is in `<answer>` and `\\boxed{}`. The table [dialogue] may change all texts except the roles and the tags
of results (docs/dialogue.md). asterism.policies.dialogue.parse_turn is the inverse.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.dialogue.json_calls import JSON_CALLS
from asterism.policies.dialogue.tool_call_format import ToolCallFormat
from asterism.policies.tools.python_tools import TOOL_SCHEMAS
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema

# The formats of tool calls by the value of dialogue.tool_call_format.
CALL_FORMATS: Mapping[str, ToolCallFormat] = {calls.name: calls for calls in (JSON_CALLS,)}

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PROTOCOL_TAGS = (  # tags of the default texts
    *("<reason>", "</reason>", "<answer>", "</answer>", "<tools>", "</tools>"),
    *(JSON_CALLS.opening, JSON_CALLS.closing, "<tool_response>", "</tool_response>"),
)

_TOOLS_TAG = "<tools>"
_TOOLS = (
    "You may call one or more functions. Their signatures stand inside <tools> </tools>:\n"
    "<tools>\n{tools}\n</tools>\n\n"
)


class DialogueFormat(msgspec.Struct, frozen=True):
    """The texts of a task's dialogues, from its table [dialogue] and its description."""

    tools: tuple[ToolSchema, ...]
    system: str  # system text with the tools' schemas; empty: no system turn
    instruction: str  # text before each question
    prefill: str  # start of each assistant turn
    answer_open: str
    answer_close: str
    stop_tokens: tuple[str, ...]
    turn_separator: str  # text after an assistant turn
    has_opening: bool = False  # the task's instance returns the first text of the user, with the question
    has_boxed_answer: bool = True  # as in TaskDescription
    unclosed_call: str = "error"  # handling of an unclosed call: "error" or "ignore"
    has_renderer: bool = False  # a renderer adds the schemas of the tools
    tool_call_format: str = JSON_CALLS.name

    @property
    def calls(self) -> ToolCallFormat:
        return CALL_FORMATS[self.tool_call_format]


def get_call_format(dialogue: DialogueConfig) -> ToolCallFormat:
    """Raise UnusableInput for an unknown dialogue.tool_call_format."""
    name = dialogue.tool_call_format
    if name not in CALL_FORMATS:
        raise UnusableInput(f'dialogue.tool_call_format = "{name}" is unknown; known: {", ".join(CALL_FORMATS)}')
    return CALL_FORMATS[name]


def build_dialogue_format(dialogue: DialogueConfig, description: TaskDescription) -> DialogueFormat:
    """Build the texts of a task's dialogues. Raises UnusableInput for an unknown form of tool calls."""
    calls = get_call_format(dialogue)
    system, instruction = dialogue.system, dialogue.instruction
    answer = f"{dialogue.answer_open} {dialogue.answer_close}"
    python_tools = dialogue.tools if description.takes_tools else ()
    tools = (*(TOOL_SCHEMAS[tool] for tool in python_tools), *description.tools)
    if system == "default":
        system = _build_default_system(description, bool(tools), dialogue, calls).replace("{answer}", answer)
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
        tool_call_format=calls.name,
    )


def _build_default_system(
    description: TaskDescription, has_tools: bool, dialogue: DialogueConfig, calls: ToolCallFormat
) -> str:
    """Build the system text. A renderer adds the instructions for calls, and has its own tags for the reasoning."""
    system = description.system if has_tools else description.system_without_tools or description.system
    parts = (system, "" if dialogue.renderer else description.tag_instruction)
    text = " ".join(filter(None, parts))
    instructions = _TOOLS + calls.instruction if has_tools and not dialogue.renderer else ""
    return "\n\n".join(filter(None, (text, instructions)))


def replace_prompt(dialogue: DialogueFormat, system: str, tools: Sequence[ToolSchema]) -> DialogueFormat:
    """Return the format of a dialogue with its own system text and tools, and without an instruction.

    The result equals the format of a task with these tools. A text that contains <tools> describes the tools itself.
    """
    schemas = "\n".join(tool.to_json() for tool in tools)
    has_instructions = _TOOLS_TAG in system or dialogue.has_renderer
    instructions = build_call_instructions(schemas, dialogue.calls) if tools and not has_instructions else ""
    text = "\n\n".join(filter(None, (system, instructions)))
    return msgspec.structs.replace(dialogue, tools=tuple(tools), system=text, instruction="", has_opening=False)


class TextSegment(NamedTuple):
    """A piece of text. Only trusted text may become special tokens: a question or a tool's output may not."""

    text: str
    trusted: bool


class TextTokenizer(Protocol):
    def encode(self, text: str, *, trusted: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def encode_segments(tokenizer: TextTokenizer, segments: Iterable[TextSegment]) -> list[int]:
    return [token for segment in segments for token in tokenizer.encode(segment.text, trusted=segment.trusted)]


def build_prompt_segments(question: str, dialogue: DialogueFormat) -> list[TextSegment]:
    """Return system turn, user turn, and the start of the first assistant turn."""
    system = f"{TURN_START}system\n{dialogue.system}{TURN_END}\n" if dialogue.system else ""
    return [
        TextSegment(f"{system}{TURN_START}user\n{dialogue.instruction}", True),
        TextSegment(question, False),
        _build_assistant_start(dialogue),
    ]


def build_opening_segments(observation: str, dialogue: DialogueFormat) -> list[TextSegment]:
    """Return the first text of the user, which follows the head of the prompt if the task has an opening."""
    return [TextSegment(observation, False), _build_assistant_start(dialogue)]


def build_user_turn_segments(text: str, dialogue: DialogueFormat) -> list[TextSegment]:
    """Return a later turn of the user: from the assistant's `<|im_end|>` to the start of its next turn."""
    head = TextSegment(f"{dialogue.turn_separator}{TURN_START}user\n", True)
    return [head, TextSegment(text, False), _build_assistant_start(dialogue)]


def build_tool_turn_segments(results: Sequence[str], dialogue: DialogueFormat) -> list[TextSegment]:
    """Return one user turn with all results: from the assistant's `<|im_end|>` to the start of its next turn."""
    segments = [TextSegment(f"{dialogue.turn_separator}{TURN_START}user\n", True)]
    for number, result in enumerate(results):
        segments.append(TextSegment(("\n" if number else "") + "<tool_response>\n", True))
        segments.append(TextSegment(result, False))
        segments.append(TextSegment("\n</tool_response>", True))
    segments.append(_build_assistant_start(dialogue))
    return segments


def _build_assistant_start(dialogue: DialogueFormat) -> TextSegment:
    return TextSegment(f"{TURN_END}\n{TURN_START}assistant\n{dialogue.prefill}", True)


def build_call_instructions(schemas: str, calls: ToolCallFormat) -> str:
    """Return the instructions that follow the default system text. `schemas`: one tool schema per line."""
    return _TOOLS.replace("{tools}", schemas) + calls.instruction
