"""Judges most answers without math-verify: exact numbers, words, and texts that cannot be final answers.

docs/grading.md lists the rules with examples. Every check takes time linear in the length of the answer.
"""

import math
import re
from typing import Literal

from asterism.sandbox.grading.choices import SPACES, compact, read_choice, read_word
from asterism.sandbox.grading.equations import evaluate, names_value, read_stated_number, split_equation
from asterism.sandbox.grading.notation import prepare_math, prepare_number
from asterism.sandbox.grading.number_forms import Number, has_digits, read_truth
from asterism.sandbox.grading.rewriting import has_ellipsis, rewrite

Acceptance = Literal["number", "expression", "any"]

MAX_MATH_CHARACTERS = 4096  # longer answers are compared as strings only
_MAX_CHARACTERS = 65_536  # longer answers must equal the truth exactly: the rules take microseconds per character
_MAX_DEPTH, _MAX_ELEMENTS = 10, 100  # math-verify's parsing time grows exponentially with the depth
_MIN_ROUNDED_DIGITS = 4  # digits of a decimal that can stand for a fraction: 0.3333 for 1/3

_CALLS = r"\\(?:gcd|lcm|max|min|sum|prod|int|i+nt|lim|binom|[dt]binom|choose|Gamma|bmod|p?mod|lfloor|lceil|operatorname|det)(?![a-zA-Z])"
_EXPRESSION = re.compile(rf"(?:[0-9.+\-*/^(){{}}\[\]]|{SPACES}|\\(?:frac|cdot|times|div|ast|sqrt)(?![a-zA-Z]))+")
_ALTERNATIVE = re.compile(r"\\(?:lor|land|vee|wedge)(?![a-zA-Z])")
_INFINITY = re.compile(r"([+-]?)\s*\\infty(?![a-zA-Z])\s*")
_VARIABLE = re.compile(
    r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])|\\(?:alpha|beta|gamma|theta|phi|lambda|mu|pi|omega)(?![a-zA-Z])"
)
_INDEXED_NUMBER = re.compile(r"(?<![\w^{}.])[0-9]+_")
_HUGE = re.compile(r"\d{6,}")
_TOWER = re.compile(r"\^[^\^,;=+]{0,40}\^[^\^,;=+]{0,40}\^|\^\s*\{?\s*\d[\d,]{5,}")
_POWER_IN_EXPONENT = re.compile(r"\^\s*[{(]*\s*(\d{1,5})\s*\^\s*[{(]*\s*(\d{1,5})")
_MAX_EXPONENT_DIGITS = 3
_NESTED_FACTORIAL = re.compile(r"!\s*[)}\]]*\s*!|[)}\]]\s*!|(?<!\d)\d{6,}\s*!")
_GROWING = re.compile(rf"{_CALLS}")


def judge_answer(answer: str, truth: str, accept: Acceptance) -> bool | None:
    """Return the verdict, or None if the answer needs math-verify."""
    if answer.strip() == truth.strip():
        return True
    if len(answer) > _MAX_CHARACTERS:
        return False
    expected = read_truth(truth)
    verdict = _judge_text(answer, truth, accept) if expected is None else _judge_number(answer, expected, accept)
    if verdict is None and (len(answer) > MAX_MATH_CHARACTERS or is_impossible(answer)):
        return False
    return verdict


def is_impossible(text: str) -> bool:
    """Return whether the text is too large, too long or too deep for a final answer: its evaluation could take forever."""
    if text.count(",") + text.count(";") > _MAX_ELEMENTS or text.count("|") > _MAX_ELEMENTS:
        return True
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH or _TOWER.search(text) or _NESTED_FACTORIAL.search(text):
        return True
    for match in _POWER_IN_EXPONENT.finditer(text):
        if int(match[2]) * math.log10(max(1, int(match[1]))) > _MAX_EXPONENT_DIGITS:
            return True
    return bool(
        _GROWING.search(text) and (_HUGE.search(text) or ("^" in text and re.search(r"\^\s*\{?\s*\d{1,2}\b", text)))
    )


# ---------------------------------------------------------------- numbers


def _judge_number(answer: str, expected: Number, accept: Acceptance) -> bool | None:
    """Judge an answer to a number: only a number is correct, unless `accept` allows arithmetic."""
    given = read_stated_number(answer)
    if given is not None:
        is_unevaluated = given.form == "fraction" and given.value.denominator == 1
        return (accept == "any" or not is_unevaluated) and are_equal(given, expected)
    if accept == "any":
        return None
    if accept == "expression" and _EXPRESSION.fullmatch(prepared := prepare_number(answer[: MAX_MATH_CHARACTERS + 1])):
        value = evaluate(prepared)
        return None if value is None else value == expected.value
    return False


def are_equal(given: Number, expected: Number) -> bool:
    """Return whether the numbers agree in unit and value; a decimal with enough digits can round the other number."""
    if given.suffix != expected.suffix and "base" in given.suffix + expected.suffix:
        return not given.suffix and given.form == "integer" and has_digits(given, expected)
    if given.suffix and expected.suffix and given.suffix != expected.suffix:
        return False
    if given.is_percentage or expected.is_percentage:
        return _are_equal_percentages(given, expected)
    if given.unit and expected.unit and given.unit != expected.unit:
        return False
    return given.value == expected.value or _rounds(given, expected) or _rounds(expected, given)


def _are_equal_percentages(given: Number, expected: Number) -> bool:
    """Return whether the values are equal. 25 and 0.25 equal the truth 25%; 25% equals the truth 0.25, but not 25."""
    if given.is_percentage and expected.is_percentage:
        return given.value == expected.value
    if given.unit and expected.unit:
        return False
    if given.is_percentage:
        return given.value / 100 == expected.value
    return expected.value in (given.value, 100 * given.value)


def _rounds(decimal: Number, exact: Number) -> bool:
    """Return whether a decimal rounds a fraction. The decimal needs four places and four significant digits."""
    digits = abs(decimal.value.numerator) * 10**decimal.num_decimals // decimal.value.denominator
    if decimal.num_decimals < _MIN_ROUNDED_DIGITS or digits < 10 ** (_MIN_ROUNDED_DIGITS - 1):
        return False
    has_finite_decimal = pow(10, exact.value.denominator.bit_length(), exact.value.denominator) == 0
    return not has_finite_decimal and decimal.value == round(exact.value, decimal.num_decimals)


# ---------------------------------------------------------------- other answers


def list_compared_texts(answer: str, truth: str) -> list[str]:
    """Return the texts that must all equal the truth.

    For an equation, these are the answer and the left sides that do not name a value, because all their letters are
    also on the right: `x^2-1` of `x^2-1 = x^2+1`, but not `f(x)` of `f(x) = x^2+1`.
    """
    given = prepare_math(answer)
    *sides, last = split_equation(given)
    if not sides or "=" in prepare_math(truth) or re.search("[,;]", given):
        return [answer]
    letters = set(_VARIABLE.findall(last))
    return [answer, *(side for side in sides if (named := set(_VARIABLE.findall(side))) and named <= letters)]


def _judge_text(answer: str, truth: str, accept: Acceptance) -> bool | None:
    given, expected = prepare_math(answer), prepare_math(truth)
    if compact(given) == compact(expected):
        return True
    if len(answer) > MAX_MATH_CHARACTERS:
        return False
    if (choice := read_choice(expected)) is not None:
        chosen = read_choice(given)
        if chosen is None and choice.text:
            return judge_answer(answer, choice.text, accept) is True
        return chosen is not None and chosen.letter == choice.letter
    if (word := read_word(expected)) is not None:
        return read_word(given) == word
    if (sign := _read_infinity(expected)) is not None:
        *sides, last = split_equation(given)
        return _read_infinity(last) == sign and all(map(_names_value, sides))
    if has_ellipsis(given) or has_ellipsis(expected):
        return False
    if _INDEXED_NUMBER.search(given) and not _INDEXED_NUMBER.search(expected):
        return False
    if _ALTERNATIVE.search(given) and not _ALTERNATIVE.search(expected):
        return False
    if "=" in expected:
        if given.count("=") > expected.count("="):
            return False
    elif not all(map(_names_value, split_equation(given)[:-1])):
        return False
    mine, theirs = rewrite(answer), rewrite(truth)
    if mine.unit and theirs.unit and mine.unit != theirs.unit:
        return False
    if mine.letters and theirs.letters and mine.letters != theirs.letters:
        return False
    return None


def _read_infinity(text: str) -> str | None:
    """Return the sign, "+" or "-", of an infinity alone, or None for any other text."""
    match = _INFINITY.fullmatch(text.strip())
    if match is None:
        return "+" if read_word(text) in ("infinity", "infinite") else None
    return match[1] or "+"


def _names_value(side: str) -> bool:
    """Return whether the text before an equals sign names a value, alone or after other assignments."""
    return names_value(side) or names_value(side.rpartition(",")[2])
