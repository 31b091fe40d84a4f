"""Random dialogues with tools, in layouts that both a cold start and a chat template read."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from asterism.policies.tools.python_tools import TOOL_SCHEMAS
from asterism.policies.tools.tool_schema import ToolSchema

Message = dict[str, Any]

STARTS = ("", "", "\n", "\n\n", " ", "I", "The", ">", "(", "</", ".", "\u00e9", "e\u0301")  # composed, decomposed
MIDDLES = ("6 * 7", "See it.", "print(1)", "\U0001f600 ja", "<b>", "1234567", "a\tb", "x = {'a': [1, 2]}", "")
ENDS = ("", "", ".", "\n", ".\n", "\n\n", " ", ">", "]", '"', "}\n", "e")
BREAKS = ("\n", "\n\n", "")  # line breaks between reasoning and text
HOSTILE = ("<|im_end|>", "<tool_response>", "<|im_start|>system\n", "</think>", "<tool_call>", "<|eot_id|>", "<|")


MORE_TOOLS = (
    *TOOL_SCHEMAS.values(),
    ToolSchema("look_up", "Gr\u00f6\u00dfe \u2603?", {"type": "object", "properties": {"q": {"type": "string"}}}),
)


class RandomDialogue(NamedTuple):
    messages: list[Message]
    system: str  # text of a system message before `messages`; empty if there is none
    tools: Sequence[ToolSchema]  # tools of the request; empty for the tools of the run


def make_dialogue(seed: int, *, run_has_tools: bool, has_tools: bool, start: str) -> RandomDialogue:
    """Make a dialogue. A prefill that is not a tag requires that each turn begins with `start`."""
    draw = random.Random(seed)
    messages: list[Message] = []
    for _ in range(draw.choice((1, 1, 2, 3))):
        messages.append({"role": "user", "content": make_text(draw, is_hostile=True)})
        for _ in range(draw.choice((0, 1, 1, 2)) if has_tools else 0):
            calls = [_make_call(draw) for _ in range(draw.choice((1, 1, 2, 3)))]
            messages.append({"role": "assistant", **_make_turn(draw, start), "tool_calls": calls})
            messages += [{"role": "tool", "content": make_text(draw, is_hostile=True)} for _ in calls]
        turn = _make_turn(draw, start)
        messages.append({"role": "assistant", **turn, "content": turn["content"] or "<answer>\\boxed{1}</answer>"})
    system = make_text(draw) if draw.random() < 0.4 else ""
    tools = MORE_TOOLS if draw.random() < 0.3 else tuple(TOOL_SCHEMAS.values()) if system or not run_has_tools else ()
    return RandomDialogue(messages, system, tools if has_tools else ())


def make_text(draw: random.Random, *, is_hostile: bool = False) -> str:
    hostile = draw.choice(HOSTILE) if is_hostile and draw.random() < 0.3 else ""
    middle = " ".join(draw.choice(MIDDLES) for _ in range(draw.randint(1, 4)))
    return draw.choice(STARTS) + middle + hostile + draw.choice(ENDS)


def _make_turn(draw: random.Random, start: str) -> Message:
    """Make a turn. Reasoning is absent, in one of two fields, or in <think>; the content can be null."""
    content = draw.choice((None, "", make_text(draw), make_text(draw)))
    if start:
        return {"content": start + (content or "")}
    match draw.randint(0, 3):
        case 0:
            return {"content": content, "reasoning_content": make_text(draw)}
        case 1:
            return {"content": content, "reasoning": make_text(draw), "thinking": None}
        case 2:
            return {"content": f"<think>{make_text(draw)}</think>{draw.choice(BREAKS)}{content or ''}"}
        case _:
            return {"content": content}


def _make_call(draw: random.Random) -> Message:
    name: str = draw.choice(tuple(TOOL_SCHEMAS))
    arguments: Message = {"code": make_text(draw), "input": draw.choice((None, make_text(draw), 1.5, [1, {"a": True}]))}
    function = {"name": name, "arguments": arguments}
    return draw.choice(({"type": "function", "id": "call_0", "function": function}, function))
