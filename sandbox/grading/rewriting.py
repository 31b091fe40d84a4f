r"""Prepares answers that are no numbers for math-verify: units, `\pm` and assignments in one form."""

import re
from typing import NamedTuple

from asterism.sandbox.grading.notation import TEXT, prepare_math
from asterism.sandbox.grading.units import MAX_UNIT_CHARACTERS, parse_unit

_UNIT = re.compile(rf"(?<=[^\s\\])(?:\s|\\[,;: ]|~)*({TEXT.pattern}.*|\^\{{?\s*\\circ\s*\}}?.*)$", re.DOTALL)
_ASSIGNMENT = re.compile(r"\s*([a-zA-Z](?:_(?:\{[^{}]*\}|\w))?)\s*=([^=<>]+)")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_MAX_ASSIGNMENTS = 8


class Expression(NamedTuple):
    text: str  # text for math-verify
    unit: str
    letters: tuple[str, ...]  # assigned letters, sorted


def rewrite(text: str) -> Expression:
    body, unit = _split_unit(prepare_math(text))
    values, letters = _sort_assignments(_expand_plus_minus(body))
    return Expression(_place_imaginary_units(values), unit, letters)


def has_ellipsis(text: str) -> bool:
    return "\\dots" in text


def _split_unit(text: str) -> tuple[str, str]:
    r"""Split off the marked unit at the end: return the text multiplied by its scale words, and the unit's name."""
    match = _UNIT.search(text) if len(text) <= 10 * MAX_UNIT_CHARACTERS else None
    unit = parse_unit(match[1]) if match is not None else None
    if match is None or unit is None or "=" in match[1] or text[: match.start()].strip()[-1:] in ",=;":
        return text, ""
    body = text[: match.start()]
    factor = f"\\cdot {unit.factor}" if unit.factor != 1 else ""
    return (f"({body}){factor}" if factor else body), unit.name


def _expand_plus_minus(text: str) -> str:
    r"""Return `a+b, a-b` for `a \pm b`."""
    if len(re.findall(r"\\(?:pm|mp)(?![a-zA-Z])", text)) != 1 or "\\mp" in text or re.search(r"[,;=<>]", text):
        return text
    before, after = re.split(r"\s*\\pm(?![a-zA-Z])", text)
    first = before + ("+" if before.strip()[-1:] not in ("", "{", "(") else "") + after
    return f"{first}, {before}-{after.lstrip()}"


def _sort_assignments(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the values of `y=1, x=2` in the order of the letters: (2, 1)."""
    parts = re.split(r",|;|\\text\s*\{\s*(?:and)\s*\}", text)
    matches = [_ASSIGNMENT.fullmatch(part) for part in parts]
    assigned = sorted((match[1], match[2].strip()) for match in matches if match is not None)
    letters = tuple(letter for letter, _ in assigned)
    if not 2 <= len(parts) == len(assigned) <= _MAX_ASSIGNMENTS or len(set(letters)) < len(letters):
        return text, ()
    return f"({', '.join(value for _, value in assigned)})", letters


def _place_imaginary_units(text: str) -> str:
    r"""Move `i` before a root: math-verify reads an `i` behind a root as another letter."""
    return re.sub(r"(\\sqrt\{[^{}]*\})\s*(?:\\cdot\s*)?i(?![a-zA-Z])", r"i\1", text)
