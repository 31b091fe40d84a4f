r"""Reads `n = 5` and `50+5 = 55` as the number that they state, and evaluates arithmetic exactly.

A left side with a letter or a function names the number and is not evaluated: `n_{\max} = 55`, `\gcd(110,165) = 55`.
Arithmetic on the left must have the value on the right: `5 = 7` states no number.
"""

import itertools
import re
from collections.abc import Iterator
from fractions import Fraction

from asterism.sandbox.grading.notation import prepare_number, strip_style
from asterism.sandbox.grading.number_forms import Number, raise_to, read_number

_MAX_SIDES = 3
_MAX_SIDE_CHARACTERS = 200
_RELATION = re.compile(r"=|\\(?:approx|equiv)(?![a-zA-Z])")
_LETTER = re.compile(r"[^\W\d_]")
_TIMES = r"\\(?:cdot|times|div|ast)(?![a-zA-Z])"
_OPERATOR = re.compile(rf"{_TIMES}|\\frac(?![a-zA-Z])")
# An operator at an end is part of another relation, as in `x != 5` and `x := 5`.
_NAME = re.compile(
    r"[\w\\({\[|+\-\u2220\u25b3](?:[\w\\{}()\[\]|^+\-*/.'! \u2220\u25b3]*(?:[\w)\]}|'](?<!_)|\^\*))?",
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SEPARATING_WORD = re.compile(r"(?<![a-zA-Z\\])(?:or|and|not|is)(?![a-zA-Z])")
_SEPARATING_LINES = (
    "le leq leqslant ge geq geqslant ne neq lt gt ll gg approx sim simeq cong equiv in notin not neg lor land vee wedge",
    "to implies Rightarrow rightarrow Leftrightarrow iff quad qquad hspace phantom boxed fbox pm mp left right",
)
_SEPARATING_COMMANDS = frozenset(word for line in _SEPARATING_LINES for word in line.split())

_TOKEN = re.compile(rf" ?([0-9]+(?:\.[0-9]+)?|\.[0-9]+|{_OPERATOR.pattern}|[-+*/^(){{}}]) ?")
_OPERATORS = {"\\cdot": "*", "\\times": "*", "\\ast": "*", "\\div": "/"}
_MAX_TOKENS, _MAX_BRACKETS = 200, 40


def read_stated_number(text: str) -> Number | None:
    """Return the number if `text` is only a number, or an equation that states one, and None otherwise."""
    if (number := read_number(text)) is not None or len(text) > _MAX_SIDES * _MAX_SIDE_CHARACTERS:
        return number
    prepared = prepare_number(text)
    while (inner := strip_style(prepared)[0]) != prepared:
        prepared = inner
    depths = _measure_depths(prepared)
    relations = [match for match in _RELATION.finditer(prepared) if depths[match.start()] == 0]
    if not 0 < len(relations) < _MAX_SIDES:
        return None
    starts = [0, *(match.end() for match in relations)]
    sides = [prepared[start : match.start()].strip() for start, match in zip(starts, relations, strict=False)]
    number = read_number(prepared[starts[-1] :])
    is_congruence = any("equiv" in match[0] for match in relations)
    if number is None or (is_congruence and not number.suffix.startswith("mod")):
        return None
    return number if _are_sides(sides, number, relations) else None


def split_equation(text: str) -> list[str]:
    """Return the parts of the text between the equals signs outside brackets."""
    depths = _measure_depths(text)
    places = [
        -1,
        *(place for place, character in enumerate(text) if character == "=" and depths[place] == 0),
        len(text),
    ]
    return [text[start + 1 : end] for start, end in itertools.pairwise(places)]


def _measure_depths(text: str) -> list[int]:
    """Return the number of open brackets before each character, and after the last one."""
    depths = [0]
    for character in text:
        depths.append(depths[-1] + (character in "({[") - (character in ")}]"))
    return depths


def _are_sides(sides: list[str], number: Number, relations: list[re.Match[str]]) -> bool:
    """Return whether each side either names the number or equals the number in value and unit."""
    value = number.value / 100 if number.is_percentage else number.value
    for side, relation in zip(sides, relations, strict=True):
        if (stated := _read_side(side, number)) is not None:
            if (stated.value, stated.unit) != (number.value, number.unit):
                return False
        elif _LETTER.search(_OPERATOR.sub("", side)):
            if not names_value(side):
                return False
        elif relation[0] != "=" or evaluate(side) != value:
            return False
    return True


def _read_side(side: str, number: Number) -> Number | None:
    """Return a number with a unit. A plain letter is a unit if the right side has one: `12 m = 12 cm`."""
    stated = read_number(side) or (read_number(f"\\text{{{side}}}") if number.unit else None)
    return stated if stated is not None and stated.unit else None


def names_value(side: str) -> bool:
    """Return whether a left side names one value: no relation, no list and no second answer outside its brackets."""
    side = re.sub(_TIMES, "*", side.strip()).strip()
    if len(side) > _MAX_SIDE_CHARACTERS or not _LETTER.search(_OPERATOR.sub("", side)) or side.count("|") % 2:
        return False
    depths = _measure_depths(side)
    if min(depths) < 0 or depths[-1] != 0 or _SEPARATING_WORD.search(side):
        return False
    outside = "".join(character for character, *around in zip(side, depths, depths[1:], strict=False) if 0 in around)
    return _NAME.fullmatch(outside) is not None and _SEPARATING_COMMANDS.isdisjoint(_COMMAND.findall(outside))


# ---------------------------------------------------------------- arithmetic


class _NotArithmeticError(Exception):
    """The text is no arithmetic of numbers, or its value has too many digits."""


def evaluate(text: str) -> Fraction | None:
    """Return the exact value of an expression of numbers, + - * / ^, fractions and brackets, or None."""
    if text.count("(") + text.count("{") > _MAX_BRACKETS:
        return None
    try:
        tokens = list(_split(text))
        value, place = _read_sum(tokens, 0)
    except _NotArithmeticError:
        return None
    return value if tokens[place] == "end" else None


def _split(text: str) -> Iterator[str]:
    place = num_tokens = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        num_tokens += 1
        if match is None or num_tokens > _MAX_TOKENS:
            raise _NotArithmeticError
        yield _OPERATORS.get(match[1], match[1])
        place = match.end()
    yield "end"


def _read_sum(tokens: list[str], place: int) -> tuple[Fraction, int]:
    sign = -1 if tokens[place] == "-" else 1
    value, place = _read_product(tokens, place + (tokens[place] in "+-"))
    value *= sign
    while tokens[place] in ("+", "-"):
        sign = -1 if tokens[place] == "-" else 1
        term, place = _read_product(tokens, place + 1)
        value += sign * term
    return value, place


def _read_product(tokens: list[str], place: int) -> tuple[Fraction, int]:
    value, place = _read_power(tokens, place)
    while tokens[place] in ("*", "/"):
        operator = tokens[place]
        factor, place = _read_power(tokens, place + 1)
        if operator == "/" and not factor:
            raise _NotArithmeticError
        value = value / factor if operator == "/" else value * factor
    return value, place


def _read_power(tokens: list[str], place: int) -> tuple[Fraction, int]:
    base, place = _read_factor(tokens, place)
    if tokens[place] != "^":
        return base, place
    sign = -1 if tokens[place + 1] == "-" else 1
    exponent, place = _read_factor(tokens, place + 1 + (tokens[place + 1] == "-"))
    power = raise_to(base, sign * exponent.numerator) if exponent.denominator == 1 else None
    if power is None:
        raise _NotArithmeticError
    return power, place


def _read_factor(tokens: list[str], place: int) -> tuple[Fraction, int]:
    token = tokens[place]
    if token == "\\frac":
        top, place = _read_factor(tokens, place + 1)
        bottom, place = _read_factor(tokens, place)
        if not bottom:
            raise _NotArithmeticError
        return top / bottom, place
    if token in ("(", "{"):
        value, place = _read_sum(tokens, place + 1)
        if tokens[place] != {"(": ")", "{": "}"}[token]:
            raise _NotArithmeticError
        return value, place + 1
    if not token[0].isdigit() and token[0] != ".":
        raise _NotArithmeticError
    return Fraction(token), place + 1
