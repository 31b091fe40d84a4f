"""Defines the record of a form in which a model writes its tool calls.

A further form needs a module with its record, and a line in the table
`asterism.policies.dialogue.chat_format.CALL_FORMATS`; the key `dialogue.tool_call_format` chooses it by name.
`asterism.policies.dialogue.json_calls` is the example to copy:

    calls = dialogue.calls                                 # the record of a task's dialogues
    text = calls.format_call("jupyter_code", {"code": "6 * 7"})
    [block] = iter_call_blocks(text, calls)                # asterism.policies.dialogue.call_blocks
    calls.read_call(block.content, dialogue.tools)         # {"name": "jupyter_code", "arguments": {...}}
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asterism.policies.tools.tool_schema import ToolSchema


class ToolCallFormat(NamedTuple):
    """A call is a block: an opening tag, the content, and a closing tag.

    The content may contain both tags, for example in a program. A turn may hold several blocks, and the last one may
    lack its closing tag. A block with incomplete content is a malformed call: the model reads the error as the result.
    """

    name: str  # value of dialogue.tool_call_format
    opening: str
    closing: str
    instruction: str  # follows the schemas of the tools in the system text
    # Formats a call, with its tags; `read_call` reads it back.
    format_call: Callable[[str, dict[str, Any]], str]
    # (text, start of a content) -> position behind the whole content and its blanks, or None if it is incomplete.
    # The time for all blocks of a text must grow linearly with its length.
    skip_content: Callable[[str, int], int | None]
    # (content without outer blanks, tools) -> an object with "name" and "arguments", which the caller checks. The
    # function raises ValueError with the text for the model. If a format writes all values as text, the function
    # converts them to the types of the schemas.
    read_call: Callable[[str, Sequence[ToolSchema]], object]
    # Jinja text that writes a call in the exported chat template. It reads `function.name` and `function.arguments`,
    # which is an object or JSON text.
    template: str
    sglang_parser: str  # value of SGLang's --tool-call-parser; empty: no parser fits

    def wrap(self, content: str) -> str:
        """Return the content between the tags, each on a line of its own."""
        return f"{self.opening}\n{content}\n{self.closing}"
