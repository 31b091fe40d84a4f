"""Renders the dialogue's text: ChatML roles, protocol tags, tool schemas.

rStar2-Agent (arXiv 2508.20722, section 3): generation starts after a prefilled `<reason>`; a tool
call is JSON in `<tool_call>`, its result a `<tool_response>` in a user turn; the final answer is
in `<answer>` and `\\boxed{}`. policies.dialogue.parse_turn is the inverse.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

ToolName = Literal["jupyter_code", "python_code_with_standard_io"]

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PREFILL = "<reason>"
PROTOCOL_TAGS = (
    *("<reason>", "</reason>", "<answer>", "</answer>", "<tools>", "</tools>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)

SYSTEM_PROMPT = (
    "You are a helpful assistant that solves problems step by step, with the help of a Python tool. "
    "Reason inside <reason> </reason> and give the final answer inside <answer> </answer>.\n\n"
    "You may call one or more functions. Their signatures stand inside <tools> </tools>:\n"
    "<tools>\n{schemas}\n</tools>\n\n"
    "For each call return a JSON object with the function's name and arguments inside <tool_call> </tool_call>:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)
USER_INSTRUCTION = "Solve the problem below. Put the final answer inside <answer> </answer> and \\boxed{}.\n\n"

_CODE_PARAMETER = {"type": "string", "description": "The Python code to run."}
_INPUT_PARAMETER = {"type": "string", "description": "What the code reads from standard input."}
# By tool: description, parameters, required parameters.
TOOL_DEFINITIONS: dict[ToolName, tuple[str, dict[str, dict[str, str]], list[str]]] = {
    "jupyter_code": (
        "Run Python code in a notebook. Names defined in earlier calls are still there.",
        {"code": _CODE_PARAMETER},
        ["code"],
    ),
    "python_code_with_standard_io": (
        "Run a Python program of its own, with the given standard input.",
        {"code": _CODE_PARAMETER, "input": _INPUT_PARAMETER},
        ["code", "input"],
    ),
}


class TextSegment(NamedTuple):
    """Only trusted text may become special tokens: a question or a tool's output may not."""

    text: str
    trusted: bool


class TextTokenizer(Protocol):
    def encode(self, text: str, *, trusted: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def encode_segments(tokenizer: TextTokenizer, segments: Iterable[TextSegment]) -> list[int]:
    return [token for segment in segments for token in tokenizer.encode(segment.text, trusted=segment.trusted)]


def build_tool_schema(tool: ToolName) -> dict[str, Any]:
    """The tool as a JSON schema, in the function-calling layout."""
    description, properties, required = TOOL_DEFINITIONS[tool]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool, "description": description, "parameters": parameters}}


def format_system_prompt(tools: Sequence[ToolName]) -> str:
    return SYSTEM_PROMPT.format(schemas="\n".join(json.dumps(build_tool_schema(tool)) for tool in tools))


def build_prompt_segments(question: str, tools: Sequence[ToolName]) -> list[TextSegment]:
    """System, user, and the start of the first assistant turn."""
    head = f"{TURN_START}system\n{format_system_prompt(tools)}{TURN_END}\n{TURN_START}user\n{USER_INSTRUCTION}"
    return [
        TextSegment(head, True),
        TextSegment(question, False),
        TextSegment(f"{TURN_END}\n{TURN_START}assistant\n{PREFILL}", True),
    ]


def build_tool_turn_segments(results: Sequence[str]) -> list[TextSegment]:
    """From after the assistant's `<|im_end|>` to its next turn: one user turn with all results."""
    segments = [TextSegment(f"\n{TURN_START}user\n", True)]
    for number, result in enumerate(results):
        segments.append(TextSegment(("\n" if number else "") + "<tool_response>\n", True))
        segments.append(TextSegment(result, False))
        segments.append(TextSegment("\n</tool_response>", True))
    segments.append(TextSegment(f"{TURN_END}\n{TURN_START}assistant\n{PREFILL}", True))
    return segments


def format_tool_call(tool: ToolName, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
