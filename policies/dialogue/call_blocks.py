"""Finds the blocks of a tag pair in a turn's text, and of <tool_call>, where the JSON may contain the closing tag.

Code such as `print("</tool_call>")` does not end its call: the block ends at the tag behind the whole
JSON object. Without a whole object the block ends at the next closing tag, and its call is malformed.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# A token of JSON and the blanks before it. A text with another character, such as a tag, ends the object's
# search at once; so the time for all openings of a text grows linearly with its length.
_TOKEN = re.compile(
    r'\s*+(?:(?P<open>[\[{])|(?P<close>[\]}])|[,:]|"[^"\\]*+(?:\\.[^"\\]*+)*+"|[-+.\w]++)',
    re.DOTALL,
)
_BLANKS = re.compile(r"\s*+")


class CallBlock(NamedTuple):
    start: int  # of the opening tag
    end: int  # behind the closing tag, or of the text
    content: str  # between the tags
    is_closed: bool


def iter_call_blocks(text: str) -> Iterator[CallBlock]:
    """Yield the blocks in order. The last one may be unclosed."""
    end = 0
    while (start := text.find(CALL_OPEN, end)) >= 0:
        begin = start + len(CALL_OPEN)
        stop = _find_close(text, begin)
        is_closed = stop < len(text)
        end = stop + len(CALL_CLOSE) if is_closed else stop
        yield CallBlock(start, end, text[begin:stop], is_closed)


def replace_call_blocks(text: str, replace: Callable[[CallBlock], str]) -> str:
    """Return the text with each closed block, its tags included, replaced."""
    parts, end = list[str](), 0
    for block in iter_call_blocks(text):
        if block.is_closed:
            parts += text[end : block.start], replace(block)
            end = block.end
    return "".join((*parts, text[end:]))


def _find_close(text: str, begin: int) -> int:
    """Return the position of the closing tag, or the length of the text without one."""
    behind = _skip_object(text, begin)
    if behind is not None and (text.startswith(CALL_CLOSE, behind) or behind == len(text)):
        return behind
    found = text.find(CALL_CLOSE, begin)
    return len(text) if found < 0 else found


def _skip_object(text: str, begin: int) -> int | None:
    """Return the position behind a balanced object or list and its blanks; None without one."""
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


def find_blocks(text: str, opening: str, closing: str) -> list[str]:
    """Return the contents of the shortest blocks from an opening to the next closing tag. One pass, unlike a lazy pattern."""
    blocks: list[str] = []
    end = 0
    while (start := text.find(opening, end)) >= 0 and (stop := text.find(closing, start + len(opening))) >= 0:
        blocks.append(text[start + len(opening) : stop])
        end = stop + len(closing)
    return blocks
