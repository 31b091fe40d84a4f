"""Finds the blocks of a tag pair in a turn's text. The content of a tool call can contain the closing tag.

A call's block ends at the closing tag behind its whole content (ToolCallFormat.skip_content). If the content is
incomplete, the block ends at the next closing tag, and its call is malformed.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from asterism.policies.dialogue.tool_call_format import ToolCallFormat


class CallBlock(NamedTuple):
    start: int  # position of the opening tag
    end: int  # position behind the closing tag, or the end of the text
    content: str  # text between the tags
    is_closed: bool


def iter_call_blocks(text: str, calls: ToolCallFormat) -> Iterator[CallBlock]:
    """Yield the blocks in order. The last block can be unclosed."""
    end = 0
    while (start := text.find(calls.opening, end)) >= 0:
        begin = start + len(calls.opening)
        stop = _find_close(text, begin, calls)
        is_closed = stop < len(text)
        end = stop + len(calls.closing) if is_closed else stop
        yield CallBlock(start, end, text[begin:stop], is_closed)


def replace_call_blocks(text: str, calls: ToolCallFormat, replace: Callable[[CallBlock], str]) -> str:
    """Return the text with each closed block, its tags included, replaced."""
    parts, end = list[str](), 0
    for block in iter_call_blocks(text, calls):
        if block.is_closed:
            parts += text[end : block.start], replace(block)
            end = block.end
    return "".join((*parts, text[end:]))


def _find_close(text: str, begin: int, calls: ToolCallFormat) -> int:
    """Return the position of the closing tag, or the length of the text without one."""
    behind = calls.skip_content(text, begin)
    if behind is not None and (text.startswith(calls.closing, behind) or behind == len(text)):
        return behind
    found = text.find(calls.closing, begin)
    return len(text) if found < 0 else found


def find_blocks(text: str, opening: str, closing: str) -> list[str]:
    """Return the contents of the shortest blocks from an opening to a closing tag. One pass, unlike a lazy pattern."""
    blocks: list[str] = []
    end = 0
    while (start := text.find(opening, end)) >= 0 and (stop := text.find(closing, start + len(opening))) >= 0:
        blocks.append(text[start + len(opening) : stop])
        end = stop + len(closing)
    return blocks
