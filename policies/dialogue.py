"""The dialogue's text: ChatML roles, tags, tool schemas, and what an assistant turn says.

rStar2-Agent (arXiv 2508.20722, section 3): generation starts after a prefilled `<reason>`; tools are called by
`<tool_call>` JSON, answer in a `<tool_response>` of a user turn, and the answer stands in `<answer>` and `\\boxed{}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec

ToolName = Literal["jupyter_code", "python_code_with_standard_io"]

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
PREFILL = "<reason>"
PROTOCOL_TAGS = (
    *("<reason>", "</reason>", "<answer>", "</answer>", "<tools>", "</tools>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)

SYSTEM = (
    "You are a helpful assistant that solves problems step by step, with the help of a Python tool. "
    "Reason inside <reason> </reason> and give the final answer inside <answer> </answer>.\n\n"
    "You may call one or more functions. Their signatures stand inside <tools> </tools>:\n"
    "<tools>\n{schemas}\n</tools>\n\n"
    "For each call return a JSON object with the function's name and arguments inside <tool_call> </tool_call>:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)
INSTRUCTION = "Solve the problem below. Put the final answer inside <answer> </answer> and \\boxed{}.\n\n"

_CODE_PARAMETER = {"type": "string", "description": "The Python code to run."}
_INPUT_PARAMETER = {"type": "string", "description": "What the code reads from standard input."}
_DESCRIPTIONS: dict[ToolName, tuple[str, dict[str, dict[str, str]], list[str]]] = {
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


class Piece(NamedTuple):
    """A stretch of text. Only trusted text may become special tokens: a question or a tool's output may not."""

    text: str
    trusted: bool


class TextTokenizer(Protocol):
    def encode(self, text: str, *, trusted: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def encode_pieces(tokenizer: TextTokenizer, pieces: Iterable[Piece]) -> list[int]:
    return [token for piece in pieces for token in tokenizer.encode(piece.text, trusted=piece.trusted)]


def tool_schema(tool: ToolName) -> dict[str, Any]:
    """The tool as JSON schema, in the layout of function calling."""
    description, properties, required = _DESCRIPTIONS[tool]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": tool, "description": description, "parameters": parameters}}


def system_text(tools: Sequence[ToolName]) -> str:
    return SYSTEM.format(schemas="\n".join(json.dumps(tool_schema(tool)) for tool in tools))


def prompt_pieces(question: str, tools: Sequence[ToolName]) -> list[Piece]:
    """System, user, and the start of the first assistant turn."""
    head = f"{TURN_START}system\n{system_text(tools)}{TURN_END}\n{TURN_START}user\n{INSTRUCTION}"
    return [Piece(head, True), Piece(question, False), Piece(f"{TURN_END}\n{TURN_START}assistant\n{PREFILL}", True)]


def tool_turn_pieces(results: Sequence[str]) -> list[Piece]:
    """From behind the assistant's `<|im_end|>` to where it may go on: one user turn with all results."""
    pieces = [Piece(f"\n{TURN_START}user\n", True)]
    for number, result in enumerate(results):
        pieces.append(Piece(("\n" if number else "") + "<tool_response>\n", True))
        pieces.append(Piece(result, False))
        pieces.append(Piece("\n</tool_response>", True))
    pieces.append(Piece(f"{TURN_END}\n{TURN_START}assistant\n{PREFILL}", True))
    return pieces


def tool_call_text(tool: ToolName, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


# ---------------------------------------------------------------- what an assistant turn says


class ToolCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    tool: ToolName
    code: str
    stdin: str


class MalformedCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call that cannot be run. The model gets `error` as its result."""

    error: str


class AssistantTurn(msgspec.Struct, frozen=True, array_like=True):
    calls: tuple[ToolCall | MalformedCall, ...]
    answer: str | None  # what stands in the last \boxed{}, preferably inside <answer>
    answer_opens: int
    answer_closes: int


_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def read_turn(text: str, tools: Sequence[ToolName]) -> AssistantTurn:
    """What the text of one assistant turn says, its end-of-turn token left out or not."""
    text = text.removesuffix(TURN_END)
    calls = tuple(_read_call(match.group(1).strip(), tools) for match in _CALL.finditer(text))
    answers = _ANSWER.findall(text)
    boxed = last_boxed(answers[-1]) if answers else None
    return AssistantTurn(
        calls=calls,
        answer=boxed if boxed is not None else last_boxed(text),
        answer_opens=text.count("<answer>"),
        answer_closes=text.count("</answer>"),
    )


def _read_call(text: str, tools: Sequence[ToolName]) -> ToolCall | MalformedCall:
    try:
        call = json.loads(text)
    except ValueError as error:
        return MalformedCall(f"JSONDecodeError: {error}")
    except RecursionError:
        return MalformedCall("JSONDecodeError: nested too deeply")
    if not isinstance(call, dict):
        return MalformedCall('a call must be an object with "name" and "arguments"')
    fields = cast(dict[str, Any], call)
    name, arguments = fields.get("name"), fields.get("arguments")
    if not isinstance(name, str) or name not in tools:
        return MalformedCall(f"unknown function {json.dumps(name)}; known: {', '.join(tools)}")
    if not isinstance(arguments, dict):
        return MalformedCall('"arguments" must be an object')
    values = cast(dict[str, Any], arguments)
    tool = cast(ToolName, name)
    wanted = _DESCRIPTIONS[tool][2]
    for parameter in wanted:
        if not isinstance(values.get(parameter), str):
            return MalformedCall(f'"{parameter}" must be given, as a string')
        if not _encodable(values[parameter]):
            return MalformedCall(f'"{parameter}" holds half a surrogate pair, which is no text')
    return ToolCall(tool=tool, code=values["code"], stdin=values["input"] if "input" in wanted else "")


def _encodable(text: str) -> bool:
    """JSON may escape a lone surrogate, which no message and no program can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def last_boxed(text: str) -> str | None:
    """What stands between the braces of the last complete `\\boxed{...}`, braces inside it balanced."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 0, start + len("\\boxed{")
        for position in range(begin - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position]
        start = text.rfind("\\boxed{", 0, start)
    return None
