"""Judges most answers without math-verify: numbers exactly, words as words, and answers that cannot be final.

docs/grading.md lists the rules with examples. Every check takes linear time in the length of the answer.
"""

import math
import re
from fractions import Fraction
from typing import Literal, NamedTuple

Acceptance = Literal["number", "expression", "any"]

MAX_MATH_CHARACTERS = 4096  # longer answers are compared as strings only
_MAX_DIGITS, _MAX_EXPONENT = 4000, 4000  # of a number
_MAX_DEPTH, _MAX_ELEMENTS = 10, 100  # math-verify's parsing time grows exponentially with the depth
_MAX_UNIT_CHARACTERS = 200  # of a number with its unit: the search for a unit takes quadratic time
_MIN_ROUNDED_DIGITS = 4  # of a decimal that may stand for a fraction: 0.3333 for 1/3

_SYMBOLS = str.maketrans(  # multiplication sign, middle dot, division sign, minus sign, root, empty set, pi, infinity
    {0xD7: "\\times ", 0xB7: "\\cdot ", 0xF7: "\\div ", 0x2212: "-", 0x221A: "\\sqrt ", 0x2205: "\\emptyset "}
    | {0x3C0: "\\pi ", 0x221E: "\\infty "}
)
_SPACES = r"(?:\s|\\[,;:! ]|~)"
_INTEGER = rf"\d{{1,3}}(?:(?:,|\{{,\}}|{_SPACES})\d{{3}})+(?!\d)|\d+"
_DECIMAL = re.compile(
    rf"(?P<whole>{_INTEGER})?(?:\.(?P<digits>\d*))?(?:\\overline\{{(?P<repeated>\d+)\}})?"
    r"(?:[eE](?P<e>[+-]?\d+)|\s*(?:\\times|\\cdot|\*)\s*10\^(?:\{(?P<power>[+-]?\d+)\}|(?P<digit>\d)))?"
)
_POWER_OF_TEN = re.compile(r"10\^(?:\{([+-]?\d+)\}|(\d))")
_FRACTION = re.compile(
    rf"(?:(?P<whole>\d+){_SPACES}*)?"
    r"\\[dt]?frac\s*(?:\{\s*(?P<top>[+-]?\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}|(?P<t>\d)(?P<b>\d))"
    rf"|(?:(?P<whole2>\d+){_SPACES}+)?(?P<over>\d+)\s*/\s*(?P<under>\d+)"
)
_UNIT = re.compile(
    r"(?P<number>[^a-zA-Z]*?|.*[}\d])\s*(?:\\[,;: ])*\s*"
    r"(?:\\(?:text|mathrm|textrm|mbox|rm)\s*\{\s*(?P<text>[^{}]*)\}(?P<power>\^\{?\d\}?)?"
    r"|(?P<percent>\\?%)|(?P<degree>\^\{?\s*\\circ\s*\}?|°)|(?P<minute>'))",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"\s*(?:[a-zA-Z]|\\[a-zA-Z]+)\s*(?:=|\\approx)\s*")
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")
_WORD = re.compile(r"[A-Za-z]{4,}|yes|no|odd|one|two|six|ten|all|red|[A-E]", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_ADJACENT_NUMBERS = re.compile(rf"\d{_SPACES}+\d")

_CALLS = r"\\(?:gcd|lcm|max|min|sum|prod|int|i+nt|lim|binom|[dt]binom|choose|Gamma|bmod|p?mod|lfloor|lceil|operatorname|det)(?![a-zA-Z])"
_FUNCTION = re.compile(rf"{_CALLS}|!|\\(?:log|ln|lg|exp|a?r?c?(?:sin|cos|tan))(?![a-zA-Z])")
_OPERATION = re.compile(
    rf"[\d)}}]\s*(?:[+*]|\\(?:times|cdot|div|ast|pm)(?![a-zA-Z]))|[\d)}}]\s*-\s*[\d(\\]|\)\s*[\d(]|\\sqrt|{_FUNCTION.pattern}"
)
_QUOTIENT = re.compile(r"/|\\[dt]?frac|\\div")
_HUGE = re.compile(r"\d{6,}")
_TOWER = re.compile(r"\^[^\^,;=+]{0,40}\^[^\^,;=+]{0,40}\^|\^\s*\{?\s*\d[\d,]{5,}")
_POWER_IN_EXPONENT = re.compile(r"\^\s*[{(]*\s*(\d{1,5})\s*\^\s*[{(]*\s*(\d{1,5})")
_MAX_EXPONENT_DIGITS = 3
_NESTED_FACTORIAL = re.compile(r"!\s*[)}\]]*\s*!|[)}\]]\s*!|(?<!\d)\d{6,}\s*!")
_GROWING = re.compile(rf"{_CALLS}")


class _Text(NamedTuple):
    text: str  # with spaces
    number: Fraction | None
    is_decimal: bool
    unit: str


def judge_answer(answer: str, truth: str, accept: Acceptance) -> bool | None:
    """The verdict; None if the answer needs math-verify."""
    if _compact(prepare_math(answer)) == _compact(prepare_math(truth)):
        return True
    if len(answer) > MAX_MATH_CHARACTERS or is_impossible(answer):
        return False
    given, expected = _read_text(answer), _read_text(truth)
    if given.number is not None and expected.number is not None:
        if given.unit and expected.unit and given.unit != expected.unit:
            return False
        if accept != "any" and expected.number.denominator == 1 and _QUOTIENT.search(given.text):
            return False
        return _are_equal(given, expected)
    if (word := _read_word(expected.text)) is not None:
        return _read_word(given.text) == word
    bases = _BASE.fullmatch(_compact(given.text)), _BASE.fullmatch(_compact(expected.text))
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    if expected.number is not None and (_ADJACENT_NUMBERS.search(given.text) or _is_unevaluated(given.text, accept)):
        return False
    return None


def is_impossible(text: str) -> bool:
    """Whether the text is too large, too long or too deep for a final answer: its evaluation may take forever."""
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


# ---------------------------------------------------------------- texts


def prepare_math(text: str) -> str:
    """The text in the notation that math-verify reads."""
    text = text.strip().strip("$").strip()
    if text.endswith(".") and not text.endswith("\\."):
        text = text[:-1].rstrip()
    text = re.sub(r"(?<!\\)\$", "", text.translate(_SYMBOLS))
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])", "", text).replace("\\varnothing", "\\emptyset")
    text = re.sub(r"\\[dt]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"(?<=\d)\.(?=\s*/)", "", text)  # 1./3
    text = re.sub(r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1", text)
    text = re.sub(r"\\sqrt\s*(\d+|[a-z])", r"\\sqrt{\1}", text)
    return re.sub(r"(?<=\d)(?:\\[,!]|\{,\})+(?=\d{3}(?!\d))", "", text)


def _read_text(text: str) -> _Text:
    prepared = prepare_math(text)
    number_text = prepared[match.end() :] if (match := _ASSIGNMENT.match(prepared)) else prepared
    unit = ""
    number = _parse_number(number_text)
    if number is None and len(number_text) < _MAX_UNIT_CHARACTERS and (match := _UNIT.fullmatch(number_text)):
        number, unit = _parse_number(match["number"]), _name_unit(match)
        number_text = match["number"]
    return _Text(prepared, number, number is not None and "." in number_text, unit)


def _name_unit(match: re.Match[str]) -> str:
    if match["text"] is None:
        return "%" if match["percent"] else "degree" if match["degree"] else "minute"
    name = "".join(match["text"].split()).lower().rstrip(".")
    return (name[:-1] if len(name) > 3 and name.endswith("s") else name) + (match["power"] or "").strip("^{}")


def _compact(text: str) -> str:
    """Without spaces, except one between two digits."""
    plain = _TEXT.sub(r"\1", text)
    return re.sub(rf"(?<!\d){_SPACES}+|{_SPACES}+(?!\d)|\.$", "", re.sub(rf"{_SPACES}+", " ", plain.strip()))


def _read_word(text: str) -> str | None:
    """In lower case, or None. A formula of several letters is a product, unless it is a known word."""
    plain = " ".join(_TEXT.sub(r"\1", text).split()).strip(".()")
    words = plain.split(" ")
    is_marked = plain != text.strip(".()") and len(plain) > 1
    if all(word.isalpha() for word in words) and (is_marked or all(_WORD.fullmatch(word) for word in words)):
        return plain.lower() if len(plain) > 1 else plain
    return None


# ---------------------------------------------------------------- numbers


def _parse_number(text: str) -> Fraction | None:
    """A number without operations, exactly."""
    text = text.strip().removeprefix("\\$").strip()
    sign = -1 if text.startswith("-") else 1
    text = text.removeprefix("-").removeprefix("+").strip().removeprefix("\\$").strip()
    if len(text) > _MAX_DIGITS:
        return None
    if (match := _FRACTION.fullmatch(text)) is not None:
        whole = int(match["whole"] or match["whole2"] or 0)
        top = int(match["top"] or match["t"] or match["over"])
        bottom = int(match["bottom"] or match["b"] or match["under"])
        if not bottom or (whole and not 0 < top < bottom):
            return None
        return sign * (whole + Fraction(top, bottom))
    if (match := _POWER_OF_TEN.fullmatch(text)) is not None and abs(
        exponent := int(match[1] or match[2])
    ) <= _MAX_EXPONENT:
        return sign * Fraction(10) ** exponent
    match = _DECIMAL.fullmatch(text)
    if match is None or not (match["whole"] or match["digits"] or match["repeated"]):
        return None
    exponent = int(match["e"] or match["power"] or match["digit"] or 0)
    if abs(exponent) > _MAX_EXPONENT:
        return None
    whole, digits, repeated = re.sub(r"\D", "", match["whole"] or ""), match["digits"] or "", match["repeated"]
    value = Fraction(int(whole + digits or 0), 10 ** len(digits))
    if repeated:
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(digits))
    return sign * value * Fraction(10) ** exponent


def _are_equal(given: _Text, expected: _Text) -> bool:
    """Exactly, or a decimal with enough digits that rounds a fraction without a finite decimal."""
    one, other = given.number, expected.number
    assert one is not None
    assert other is not None
    if one == other or (
        "%" in (given.unit, expected.unit) and given.unit != expected.unit and _differ_by_percent(given, expected)
    ):
        return True
    for rounded, exact in ((given, other), (expected, one)):
        if rounded.is_decimal and not _has_finite_decimal(exact):
            digits = len(re.sub(r"\D", "", rounded.text.rpartition(".")[2]))
            if digits >= _MIN_ROUNDED_DIGITS and rounded.number == round(exact, digits):
                return True
    return False


def _differ_by_percent(given: _Text, expected: _Text) -> bool:
    percent, plain = (given, expected) if given.unit == "%" else (expected, given)
    assert percent.number is not None
    return percent.number / 100 == plain.number


def _has_finite_decimal(number: Fraction) -> bool:
    return 10**60 % number.denominator == 0


def _is_unevaluated(text: str, accept: Acceptance) -> bool:
    """Whether an operation remains in the answer, so that it may restate the question."""
    if accept == "any":
        return False
    return bool((_OPERATION if accept == "number" else _FUNCTION).search(text))
