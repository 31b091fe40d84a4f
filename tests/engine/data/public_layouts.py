"""Rows of public data sets of function calls, in their layouts.

Each row of PUBLIC_ROWS has a call, its result and an answer. Each row of SEVERAL_CALLS_ROWS has reasoning, a text, two
calls in one turn, their results and an answer.
"""

import json
from typing import Any

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The city."},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
CLOCK = {"name": "get_time", "description": "Get the time.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [TOOL, {"type": "function", "function": CLOCK}]
ARGUMENTS = {"city": "Zürich", "unit": "celsius"}
RESULT = '{"degrees": 4}'
QUESTION, ANSWER, SYSTEM = "Is it cold in Zürich?", "Yes, it has 4 °C.", "You are a weather service."
CALL_TEXT = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)


def say(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def write_sharegpt(**texts: str) -> list[dict[str, str]]:
    """Write turns in the layout of ShareGPT. A digit at the end of a keyword is not part of the name of the speaker."""
    return [{"from": name.rstrip("0123456789"), "value": text} for name, text in texts.items()]


def write_call(arguments: Any, **fields: str) -> dict[str, Any]:
    return {**fields, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


BEGIN = [say("system", SYSTEM), say("user", QUESTION)]
CALL = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
NAMED_RESULT = {"role": "tool", "name": "get_weather", "content": RESULT}
NUMBERED_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": RESULT}
PUBLIC_ROWS: dict[str, dict[str, Any]] = {
    "TRL messages with tools": {
        "tools": TOOLS,
        "messages": [
            *(*BEGIN, {"role": "assistant", "tool_calls": [write_call(ARGUMENTS)]}),
            *(NAMED_RESULT, say("assistant", ANSWER)),
        ],
    },
    "OpenAI function_call": {
        "tools": json.dumps(TOOLS),
        "messages": [
            *(*BEGIN, say("assistant", None, function_call=CALL)),
            *(NAMED_RESULT | {"role": "function"}, say("assistant", ANSWER, function_call=None)),
        ],
    },
    "ShareGPT": {
        "system": SYSTEM,
        "tools": json.dumps([WEATHER, CLOCK]),
        "conversations": write_sharegpt(human=QUESTION, function_call=CALL_TEXT, observation=RESULT, gpt=ANSWER),
    },
    "Hermes": {
        "tools": json.dumps(TOOLS),
        "conversations": write_sharegpt(
            **{"system": SYSTEM, "human": QUESTION, "gpt1": f"<tool_call>\n{CALL_TEXT}\n</tool_call>"},
            **{"tool": f"<tool_response>\n{RESULT}\n</tool_response>", "gpt2": ANSWER},
        ),
    },
    "reasoning_content": {
        "tools": TOOLS,
        "messages": [
            *BEGIN,
            say("assistant", "", reasoning_content="", tool_calls=[write_call(CALL["arguments"], id="call_1")]),
            *(NUMBERED_RESULT, say("assistant", ANSWER, reasoning_content="")),
        ],
    },
}

THOUGHT, REMARK, TIME = "I need both.\n", "One moment.", "12:30 \u2603"
THOUGHT_AND_REMARK = f"<think>{THOUGHT}</think>\n{REMARK}"
TIME_CALL = {"name": "get_time", "arguments": {}}
TWO_CALLS = [
    write_call(CALL["arguments"], id="call_1"),
    {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
]


def build_sharegpt_row(*calls: str) -> dict[str, Any]:
    called = {f"function_call{number}": call for number, call in enumerate(calls)}
    texts = {"human": QUESTION, "gpt1": THOUGHT_AND_REMARK, **called, "observation1": RESULT, "observation2": TIME}
    return PUBLIC_ROWS["ShareGPT"] | {"conversations": write_sharegpt(**texts, gpt2=ANSWER)}


SEVERAL_CALLS_ROWS: dict[str, dict[str, Any]] = {
    "TRL messages with tools": {
        "tools": TOOLS,
        "messages": [
            *BEGIN,
            say(
                *("assistant", THOUGHT_AND_REMARK),
                tool_calls=[write_call(ARGUMENTS), {"type": "function", "function": TIME_CALL}],
            ),
            *(NAMED_RESULT, {"role": "tool", "name": "get_time", "content": TIME}, say("assistant", ANSWER)),
        ],
    },
    "ShareGPT": build_sharegpt_row(CALL_TEXT, json.dumps(TIME_CALL)),
    "ShareGPT with a list of calls": build_sharegpt_row(f"[{CALL_TEXT}, {json.dumps(TIME_CALL)}]"),
    "Hermes": {
        "tools": json.dumps(TOOLS),
        "conversations": write_sharegpt(
            **{"system": SYSTEM, "human": QUESTION},
            gpt1=f"{THOUGHT_AND_REMARK}\n<tool_call>\n{CALL_TEXT}\n</tool_call>\n"
            f"<tool_call>\n{json.dumps(TIME_CALL)}\n</tool_call>",
            tool=f"<tool_response>\n{RESULT}\n</tool_response>\n<tool_response>\n{TIME}\n</tool_response>",
            gpt2=ANSWER,
        ),
    },
    "reasoning_content": {
        "tools": TOOLS,
        "messages": [
            *(*BEGIN, say("assistant", REMARK, reasoning_content=THOUGHT, tool_calls=TWO_CALLS)),
            *(NUMBERED_RESULT, {"role": "tool", "tool_call_id": "call_2", "content": TIME}),
            say("assistant", ANSWER, reasoning_content=None),
        ],
    },
}
