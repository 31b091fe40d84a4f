"""Reads reasoning in the text of a cold-start turn, in <think> or in the tag of the prefill, and checks the tags.

Some data sets leave out the opening tag, which a chat template writes before the turn: the text up to the closing tag
is then reasoning. All other tags need their pair.
"""

import re
from typing import NamedTuple

from asterism.policies.dialogue.call_blocks import iter_call_blocks
from asterism.policies.dialogue.json_calls import JSON_CALLS
from asterism.policies.dialogue.tool_call_format import ToolCallFormat

THINK = "think"
_TAG = re.compile(r"<(/?)(\w+)>")


class BrokenTags(ValueError):
    """A tag of reasoning without its pair, inside of another pair, or in addition to a field with reasoning."""


class SplitText(NamedTuple):
    reasoning: str  # text within the tags; empty without reasoning
    rest: str


def split_reasoning(content: str, tag: str = THINK, calls: ToolCallFormat = JSON_CALLS) -> SplitText:
    """Split off the reasoning at the start: a pair of tags, or the text before a closing tag without its pair."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    begun = content.lstrip()
    before, found, after = begun.removeprefix(opening).partition(closing)
    if begun.startswith(opening) and found:
        return SplitText(before, after.lstrip())
    bare = _remove_calls(content, calls)
    first = bare.find(closing)
    if first < 0 or opening in bare[:first] or closing not in content[: _find_call(content, calls)]:
        return SplitText("", content)
    return SplitText(before.strip(), after.lstrip())


def join_reasoning(content: str, reasoning: str | None, prefill: str, tag: str, calls: ToolCallFormat) -> str:
    """Put the turn's first reasoning into one pair of `tag`, which is the tag of `prefill`. Raise BrokenTags.

    `reasoning`: the reasoning of a separate field, or None.
    """
    if reasoning is None:
        begun = content.lstrip()
        if begun.startswith(prefill):
            return begun
        own = split_reasoning(content, tag, calls)
        reasoning, content = own if own != ("", content) else split_reasoning(content, calls=calls)
    elif any(split_reasoning(content, each, calls) != ("", content) for each in (tag, THINK)):
        raise BrokenTags("has reasoning in its text and in a separate field; keep only one of the two")
    separator = "\n" if content else ""
    return f"{prefill}{reasoning}</{tag}>{separator}{content}"


def require_pairs(text: str, *tags: str, prefix: str = "", calls: ToolCallFormat = JSON_CALLS) -> None:
    """Raise BrokenTags for a tag of reasoning without its pair, or inside of another pair; texts of calls are skipped.

    `prefix`: a tag that needs no pair at the start of the text, if no other tag follows.
    """
    found = [each for each in _TAG.findall(_remove_calls(text, calls)) if each[1] in tags]
    if found == [("", prefix)] and text.startswith(f"<{prefix}>"):
        return
    open_tag = ""
    for closes, name in found:
        if bool(closes) != bool(open_tag) or (closes and name != open_tag):
            where = f"inside of <{open_tag}>" if open_tag else "without its pair"
            raise BrokenTags(f"has <{closes}{name}> {where}; each tag of reasoning needs its pair")
        open_tag = "" if closes else name
    if open_tag:
        raise BrokenTags(f"has <{open_tag}> without its pair; each tag of reasoning needs its pair")


def _find_call(text: str, calls: ToolCallFormat) -> int:
    """Return the position of the first call, or the length of the text."""
    return next((block.start for block in iter_call_blocks(text, calls)), len(text))


def _remove_calls(text: str, calls: ToolCallFormat) -> str:
    parts, end = list[str](), 0
    for block in iter_call_blocks(text, calls):
        parts.append(text[end : block.start])
        end = block.end
    return "".join((*parts, text[end:]))
