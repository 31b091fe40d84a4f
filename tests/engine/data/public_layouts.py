"""Rows in the layouts of public data sets of function calls.

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

PUBLIC_ROWS: dict[str, dict[str, Any]] = {
    "TRL messages with tools": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
            },
            {"role": "tool", "name": "get_weather", "content": RESULT},
            {"role": "assistant", "content": ANSWER},
        ],
    },
    "OpenAI function_call": {
        "tools": json.dumps(TOOLS),
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
            },
            {"role": "function", "name": "get_weather", "content": RESULT},
            {"role": "assistant", "content": ANSWER, "function_call": None},
        ],
    },
    "ShareGPT": {
        "system": SYSTEM,
        "tools": json.dumps([WEATHER, CLOCK]),
        "conversations": [
            {"from": "human", "value": QUESTION},
            {"from": "function_call", "value": CALL_TEXT},
            {"from": "observation", "value": RESULT},
            {"from": "gpt", "value": ANSWER},
        ],
    },
    "Hermes": {
        "tools": json.dumps(TOOLS),
        "conversations": [
            {"from": "system", "value": SYSTEM},
            {"from": "human", "value": QUESTION},
            {"from": "gpt", "value": f"<tool_call>\n{CALL_TEXT}\n</tool_call>"},
            {"from": "tool", "value": f"<tool_response>\n{RESULT}\n</tool_response>"},
            {"from": "gpt", "value": ANSWER},
        ],
    },
    "reasoning_content": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
            {"role": "assistant", "content": ANSWER, "reasoning_content": ""},
        ],
    },
}

THOUGHT, REMARK, TIME = "I need both.\n", "One moment.", "12:30 \u2603"
TIME_CALL = {"name": "get_time", "arguments": {}}
TWO_CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}},
    {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
]


def build_sharegpt_row(*calls: str) -> dict[str, Any]:
    return {
        "system": SYSTEM,
        "tools": json.dumps([WEATHER, CLOCK]),
        "conversations": [
            {"from": "human", "value": QUESTION},
            {"from": "gpt", "value": f"<think>{THOUGHT}</think>\n{REMARK}"},
            *({"from": "function_call", "value": call} for call in calls),
            {"from": "observation", "value": RESULT},
            {"from": "observation", "value": TIME},
            {"from": "gpt", "value": ANSWER},
        ],
    }


SEVERAL_CALLS_ROWS: dict[str, dict[str, Any]] = {
    "TRL messages with tools": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": f"<think>{THOUGHT}</think>\n{REMARK}",
                "tool_calls": [
                    {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
                    {"type": "function", "function": TIME_CALL},
                ],
            },
            {"role": "tool", "name": "get_weather", "content": RESULT},
            {"role": "tool", "name": "get_time", "content": TIME},
            {"role": "assistant", "content": ANSWER},
        ],
    },
    "ShareGPT": build_sharegpt_row(CALL_TEXT, json.dumps(TIME_CALL)),
    "ShareGPT with a list of calls": build_sharegpt_row(f"[{CALL_TEXT}, {json.dumps(TIME_CALL)}]"),
    "Hermes": {
        "tools": json.dumps(TOOLS),
        "conversations": [
            {"from": "system", "value": SYSTEM},
            {"from": "human", "value": QUESTION},
            {
                "from": "gpt",
                "value": f"<think>{THOUGHT}</think>\n{REMARK}\n<tool_call>\n{CALL_TEXT}\n</tool_call>\n"
                f"<tool_call>\n{json.dumps(TIME_CALL)}\n</tool_call>",
            },
            {
                "from": "tool",
                "value": f"<tool_response>\n{RESULT}\n</tool_response>\n<tool_response>\n{TIME}\n</tool_response>",
            },
            {"from": "gpt", "value": ANSWER},
        ],
    },
    "reasoning_content": {
        "tools": TOOLS,
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": REMARK, "reasoning_content": THOUGHT, "tool_calls": TWO_CALLS},
            {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
            {"role": "tool", "tool_call_id": "call_2", "content": TIME},
            {"role": "assistant", "content": ANSWER, "reasoning_content": None},
        ],
    },
}
