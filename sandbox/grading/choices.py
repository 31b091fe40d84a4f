"""Reads answers that are words or the letter of a choice, such as `(C) 12`."""

import re
from typing import NamedTuple

from asterism.sandbox.grading.notation import TEXT

SPACES = r"(?:\s|\\[,;:! ]|~)"
_WORD = re.compile(r"[A-Za-z]{4,}|yes|no|odd|one|two|six|ten|all|red|[A-E]", re.IGNORECASE)
_CHOICE = re.compile(
    r"(?:(?:the )?(?:correct )?(?:final )?(?:answer|option|choice) ?(?:is)? ?:? ?)?"
    r"(?:\(([A-J])\)(?P<bracketed>[\s:.0-9-].*)?|([A-J])(?:\)|\.|:)(?P<rest> .*)?|([A-J]))",
    re.IGNORECASE | re.DOTALL,
)
_SECOND_CHOICE = re.compile(r"\([A-J]\)|(?<![A-Za-z])[A-J]\)|\b(?:or|and) [A-J]\b")
_MAX_CHOICE_CHARACTERS = 300


class Choice(NamedTuple):
    letter: str
    text: str  # text behind the letter; "" for a letter alone


def compact(text: str) -> str:
    """Return the text without text commands and spaces; a space between two digits stays."""
    plain = TEXT.sub(r"\1", text)
    return re.sub(rf"(?<!\d){SPACES}+|{SPACES}+(?!\d)|\.$", "", re.sub(rf"{SPACES}+", " ", plain.strip()))


def read_choice(text: str) -> Choice | None:
    r"""Return the letter of a choice, alone or before its text: `C`, `(C)`, `\textbf{(C)}\ 12`, `C) 12`."""
    if len(text) > _MAX_CHOICE_CHARACTERS:
        return None
    plain = " ".join(re.sub(rf"{SPACES}|\\(?:quad|qquad)(?![a-zA-Z])", " ", TEXT.sub(r"\1", text)).split())
    match = _CHOICE.fullmatch(plain.removeprefix("\\").strip())
    if match is None:
        return None
    letter = match[1] or match[3] or match[5]
    rest = match["bracketed"] or match["rest"] or ""
    is_one_choice = letter.isupper() and not _SECOND_CHOICE.search(rest)
    return Choice(letter, rest.lstrip(": ").removeprefix(". ").strip()) if is_one_choice else None


def read_word(text: str) -> str | None:
    """Return words in lower case, or None. A formula of several letters is a product, unless it is a known word."""
    plain = " ".join(TEXT.sub(r"\1", text).split()).strip(".()")
    words = plain.split(" ")
    is_marked = plain != text.strip(".()") and len(plain) > 1
    if all(word.isalpha() for word in words) and (is_marked or all(_WORD.fullmatch(word) for word in words)):
        return plain.lower() if len(plain) > 1 else plain
    return None
