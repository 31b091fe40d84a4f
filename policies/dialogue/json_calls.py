"""Formats and reads calls as JSON in `<tool_call>`, as rStar2-Agent, Qwen2.5 and Hermes write them:

    <tool_call>
    {"name": "jupyter_code", "arguments": {"code": "print('</tool_call>')"}}
    </tool_call>

Code that contains the closing tag does not end its call: the block ends at the tag behind the whole JSON object.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from asterism.policies.dialogue.tool_call_format import ToolCallFormat
from asterism.policies.tools.tool_schema import ToolSchema

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
# A token of JSON and the blanks before it. A text with another character, such as a tag, ends the search for the object
# immediately, so the time for all openings of a text grows linearly with its length.
_TOKEN = re.compile(
    r'\s*+(?:(?P<open>[\[{])|(?P<close>[\]}])|[,:]|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[-+.\w]++)',
    re.DOTALL,
)
_BLANKS = re.compile(r"\s*+")
_STRING_OR_BRACKET_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)
_MAX_NESTING = 64  # limit of the nesting of a call's JSON; json.loads has a limit that depends on the caller's stack
_TEMPLATE = r"""{{ '<tool_call>\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' }}
  {%- if function.arguments is string -%}{{ function.arguments }}
  {%- else -%}
    {{ '{' }}
    {%- for name, value in function.arguments.items() if value is not none -%}
      {{ ('' if loop.first else ', ') ~ (name | tojson) ~ ': ' ~ (value | tojson) }}
    {%- endfor -%}
    {{ '}' }}
  {%- endif -%}
  {{ '}\n</tool_call>' }}"""


def format_tool_call(tool: str, arguments: dict[str, Any]) -> str:
    return JSON_CALLS.wrap(json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False))


def _skip_object(text: str, begin: int) -> int | None:
    """Return the position behind a balanced object or list and its blanks, or None if there is none."""
    depth, position = 0, begin
    while (token := _TOKEN.match(text, position)) is not None:
        position = token.end()
        depth += 1 if token["open"] else -1 if token["close"] else 0
        if depth <= 0:
            break
    if token is None or not token["close"] or depth < 0:
        return None
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


def _read_call(content: str, tools: Sequence[ToolSchema]) -> object:
    """Raise ValueError for content that is not JSON or is nested too deeply."""
    if _is_nested_too_deeply(content):
        raise ValueError("JSONDecodeError: nested too deeply")
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"JSONDecodeError: {error}") from error


def _is_nested_too_deeply(text: str) -> bool:
    depth = 0
    for match in _STRING_OR_BRACKET_PATTERN.finditer(text):
        depth += 1 if match.group() in ("[", "{") else -1 if match.group() in ("]", "}") else 0
        if depth > _MAX_NESTING:
            return True
    return False


JSON_CALLS = ToolCallFormat(
    name="json",
    opening=_OPENING,
    closing=_CLOSING,
    instruction=(
        f"For each call return a JSON object with the function's name and arguments inside {_OPENING} {_CLOSING}:\n"
        f'{_OPENING}\n{{"name": <function-name>, "arguments": <arguments-object>}}\n{_CLOSING}'
    ),
    format_call=format_tool_call,
    skip_content=_skip_object,
    read_call=_read_call,
    template=_TEMPLATE,
    sglang_parser="qwen25",
)
