"""Extracts words, numbers and operators of questions, without notation, for comparisons."""

import re
import unicodedata
from typing import NamedTuple

_NOTATION = re.compile(  # LaTeX and Markdown without content: delimiters, spaces, sizes, styles
    r"\\(?:left|right|big+|displaystyle|limits|quad|qquad|text|textbf|textit|mathrm|mathbf|boldsymbol|mbox|rm)(?![a-z])"
    r"|\\[,;:! ()\[\]]|(?<=\d),(?=\d{3}(?!\d))|\{,\}|\*\*"
)
_TOKEN = re.compile(
    r"[^\W\d_]+|(?<![^\s$(])\.\d+|\d+(?:\.\d+)?|[^\w\s.,;:?!'\"`$\\{}()\[\]|~]"
)  # words, numbers, operators
_SYNONYMS = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cdot": "*",
    "times": "*",
    "div": "/",
    "le": "leq",
    "ge": "geq",
    "ne": "neq",
}
_CHARACTERS = str.maketrans(  # multiplication sign, middle dot, division sign, minus sign, dashes, apostrophe
    {0xD7: "*", 0xB7: "*", 0xF7: "/", 0x2212: "-", 0x2013: "-", 0x2014: "-", 0x2019: "'"}
)

_SUPERSCRIPTS = str.maketrans({digit: f"^{value}" for value, digit in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})


class QuestionText(NamedTuple):
    plain: str  # the question in lower case with single spaces
    words: list[str]  # lower case, with numbers and operators
    numbers: list[str]  # numbers written in digits, sorted

    @property
    def shingles(self) -> set[str]:
        """The pairs of adjacent words, or a single word."""
        return {" ".join(pair) for pair in zip(self.words, self.words[1:], strict=False)} or set(self.words)

    def list_ngrams(self, length: int) -> set[tuple[str, ...]]:
        """List the sequences of `length` adjacent words."""
        return set(zip(*(self.words[start:] for start in range(length)), strict=False))


def parse_question(question: str) -> QuestionText:
    """Parse a question. Case, spaces, punctuation, brackets and the notation of numbers do not change the words."""
    text = question
    if not question.isascii():
        text = unicodedata.normalize("NFKC", question.translate(_SUPERSCRIPTS)).translate(_CHARACTERS)
    text = text.lower()
    plain = " ".join(text.split())
    if "\\" in text or "," in text or "**" in text:
        text = _NOTATION.sub("", text)
    found: list[str] = _TOKEN.findall(text)
    words = [_SYNONYMS.get(word, word) for word in found]
    return QuestionText(plain, words, sorted(word for word in words if word[-1].isdigit()))


def compute_similarity(one: QuestionText, other: QuestionText) -> float:
    """Return the Jaccard index of the questions' shingles."""
    left, right = one.shingles, other.shingles
    return len(left & right) / len(left | right) if left or right else 1.0
