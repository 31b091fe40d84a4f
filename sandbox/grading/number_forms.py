r"""The grammar of a number: a table of forms, each with a pattern and its value as a fraction.

A number is one form of FORMS with at most one sign and one currency sign before it and one unit behind it. It may be
in brackets or in a style such as `\mathbf`. Any other text is no number. Every pattern is matched once from the
beginning, so that the time is linear in the length of the text.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from asterism.sandbox.grading.notation import prepare_number, strip_style
from asterism.sandbox.grading.units import NO_UNIT, PERCENT, Unit, parse_unit

MAX_DIGITS = 4000  # digits of a number, and of the result of a power
_MAX_STYLES = 3  # styles around a number
_MIN_PERIODS = {1: 3}  # repetitions of a one-digit block before an ellipsis; longer blocks need two

_INTEGER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)(?![0-9])"
_EXPONENT = r"(?:\{ ?[+-]?[0-9]+ ?\}|\([+-]?[0-9]+\)|[+-]?[0-9]+)"
_POWER = rf"(?:{_INTEGER})(?: ?\^ ?{_EXPONENT})?"
_PERIOD = r"(?:\\overline|\\bar) ?\{ ?[0-9]+ ?\}|\([0-9]+\)|\\dot ?\{?[0-9]\}?(?:[0-9]*\\dot ?\{?[0-9]\}?)?"
_SCIENTIFIC = rf"[eE][+-]?[0-9]+|(?: ?(?:\\times|\\cdot|\*|\\ast) ?)10 ?\^ ?{_EXPONENT}"
_LATEX_FRACTION = r"\\frac ?(?:\{ ?%s ?\}|[0-9]) ?(?:\{ ?%s ?\}|[0-9])"
_PROPER = _LATEX_FRACTION % ("[0-9]+", "[0-9]+")


class Form(NamedTuple):
    name: str
    pattern: re.Pattern[str]
    read: Callable[[str], Fraction | None]  # value of a matching text; None if undefined, such as 1/0


class Number(NamedTuple):
    value: Fraction  # value times the factor of scale words; a percentage is not divided by 100
    unit: str = ""
    form: str = "integer"
    num_decimals: int = 0  # number of decimals of a plain decimal number
    suffix: str = ""  # the base or the modulus

    @property
    def is_percentage(self) -> bool:
        return self.unit == PERCENT


# ---------------------------------------------------------------- values of forms


def _read_integer(text: str) -> Fraction:
    return Fraction(int(re.sub("[, ]", "", text)))


def _read_decimal(text: str) -> Fraction:
    whole, _, digits = text.partition(".")
    return Fraction(int(re.sub("[, ]", "", whole) + digits), 10 ** len(digits))


def _read_exponent(text: str) -> int:
    return int(text.strip("{}() "))


def raise_to(base: Fraction, exponent: int) -> Fraction | None:
    """Return the power, or None if it has too many digits or divides by zero."""
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > 4 * MAX_DIGITS or (base == 0 and exponent <= 0):
        return None
    return base**exponent


def _read_scientific(text: str) -> Fraction | None:
    mantissa, _, exponent = re.sub(r" ?(?:\\times|\\cdot|\\ast|\*) ?10 ?\^ ?|[eE]", "e", text).partition("e")
    power = raise_to(Fraction(10), _read_exponent(exponent))
    return None if power is None else _read_decimal(mantissa) * power


def _read_power(text: str) -> Fraction | None:
    base, _, exponent = text.partition("^")
    if not exponent:
        return _read_integer(base)
    return raise_to(_read_integer(base), _read_exponent(exponent))


def _read_fraction_power(text: str) -> Fraction | None:
    base, _, exponent = text.rpartition("^")
    inner = base.strip()[1:-1].strip()
    sign = -1 if inner.startswith("-") else 1
    value = _read_fraction(inner.lstrip("+-")) if re.search(r"/|\\frac", inner) else _read_integer(inner.lstrip("+-"))
    return None if value is None else raise_to(sign * value, _read_exponent(exponent))


def _read_fraction(text: str) -> Fraction | None:
    sides = _split_fraction(text)
    top, bottom = (_read_signed_power(side) for side in sides)
    return None if top is None or not bottom else top / bottom


def _split_fraction(text: str) -> tuple[str, str]:
    if (match := re.fullmatch(r"\\frac ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\}|[0-9]) ?(\{.*\}|[0-9])", text)) is not None:
        return _strip_braces(match[1]), _strip_braces(match[2])
    top, bottom = re.split(r" ?(?:/|\\over) ?", text.strip("{} ") if "\\over" in text else text)
    return top.rstrip("."), bottom


def _strip_braces(text: str) -> str:
    return text[1:-1].strip() if text.startswith("{") else text


def _read_signed_power(text: str) -> Fraction | None:
    value = _read_power(text.lstrip("+-"))
    return -value if value is not None and text.startswith("-") else value


def _read_mixed(text: str) -> Fraction | None:
    whole, separator, fraction = text.partition("\\") if "\\" in text else text.partition(" ")
    value = _read_fraction(separator.strip() + fraction)
    return int(whole) + value if value is not None and 0 < value < 1 else None


def _read_repeating(text: str) -> Fraction:
    whole, _, digits = text.partition(".")
    period = re.search(_PERIOD, digits)
    assert period is not None
    repeated = re.sub(r"\D", "", period[0])
    start = _read_decimal(f"{whole or 0}.{digits[: period.start()]}")
    return start + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** period.start())


def _read_ellipsis(text: str) -> Fraction | None:
    """Return the value if a block of digits at the end occurs at least twice, or three times if it is one digit."""
    whole, _, digits = text.partition(".")
    digits = digits.removesuffix("\\dots").strip()
    for length in range(1, len(digits) // 2 + 1):
        block = digits[-length:]
        if digits.endswith(block * _MIN_PERIODS.get(length, 2)):
            while digits.endswith(block):
                digits = digits.removesuffix(block)
            return _read_repeating(f"{whole or 0}.{digits}\\overline{{{block}}}")
    return None


FORMS = tuple(
    Form(name, re.compile(pattern), read)
    for name, pattern, read in (
        ("scientific", rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:{_SCIENTIFIC})(?![0-9])", _read_scientific),
        ("repeating", rf"(?:{_INTEGER})?\.[0-9]*(?:{_PERIOD})", _read_repeating),
        ("ellipsis", rf"(?:{_INTEGER})?\.[0-9]+ ?\\dots", _read_ellipsis),
        ("decimal", rf"(?:{_INTEGER})?\.[0-9]+(?![0-9])", _read_decimal),
        ("mixed", rf"[0-9]+(?: ?{_PROPER}| [0-9]+ ?/ ?[0-9]+(?![0-9]))", _read_mixed),
        ("fraction", _LATEX_FRACTION % (f"[+-]?{_POWER}", f"[+-]?{_POWER}"), _read_fraction),
        ("fraction", rf"{_POWER}\.? ?/ ?{_POWER}(?![0-9])", _read_fraction),
        ("fraction", rf"\{{ ?{_POWER} ?\\over ?{_POWER} ?\}}|{_POWER} ?\\over ?{_POWER}", _read_fraction),
        ("power", rf"\( ?[+-]?(?:{_INTEGER}|{_PROPER}|[0-9]+ ?/ ?[0-9]+) ?\) ?\^ ?{_EXPONENT}", _read_fraction_power),
        ("power", rf"{_INTEGER} ?\^ ?{_EXPONENT}(?![0-9])", _read_power),
        ("integer", _INTEGER, _read_integer),
    )
)

# ---------------------------------------------------------------- numbers

_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,4000}")
_SIGN = re.compile(r"([+-]?) ?(\\\$|\$|\u20ac|\u00a3|\u00a5|\\pounds|\\euro)? ?([+-]?) ?")
_CURRENCIES = {
    **{"\\$": "dollar", "$": "dollar", "\u20ac": "euro", "\\euro": "euro"},
    **{"\u00a3": "pound sterling", "\\pounds": "pound sterling", "\u00a5": "yen"},
}
_BASE_WORDS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASE = re.compile(
    r"(?=(?:\(|\\text\{)?[A-F]*[0-9])(?:([0-9A-F]+)|\(([0-9A-F]+)\)|\\text\{([0-9A-F]+)\}) ?_ ?"
    r"(?:\{ ?([0-9]+|[a-z]+) ?\}|\{ ?\\text ?\{ ?([a-z]+) ?\} ?\}|\\text ?\{ ?([a-z]+) ?\}|([0-9]{1,2}))"
)
_MODULO = r"(?:\\[bp]?mod|mod(?= )|\\(?:text|mathrm|operatorname) ?\{ ?mod ?\})"
_MODULUS = re.compile(
    rf" ?(?:{_MODULO} ?(?:\{{ ?([0-9]+) ?\}}|([0-9]+))|\( ?{_MODULO} ?(?:\{{ ?([0-9]+) ?\}}|([0-9]+)) ?\))"
)


def read_number(text: str) -> Number | None:
    """Return the exact number if `text` is only a number, or None."""
    if _PLAIN_INTEGER.fullmatch(text) is not None:
        return Number(Fraction(int(text)))
    return _read_prepared(prepare_number(text)) if len(text) <= MAX_DIGITS else None


@lru_cache(maxsize=4096)
def read_truth(text: str) -> Number | None:
    """Return read_number(text) from a cache: all answers to one question have the same truth."""
    return read_number(text)


def _read_prepared(text: str, is_text: bool = False, num_styles: int = 0) -> Number | None:
    if _PLAIN_INTEGER.fullmatch(text) is not None:
        return Number(Fraction(int(text)))
    inner, is_text_style = strip_style(text)
    if inner != text:
        if num_styles == _MAX_STYLES:
            return None
        return _read_prepared(prepare_number(inner), is_text or is_text_style, num_styles + 1)
    if (match := _BASE.fullmatch(text)) is not None:
        return _read_base(match)
    match = _SIGN.match(text)
    assert match is not None
    if match[1] and match[3]:
        return None
    body = text[match.end() :]
    sign = -1 if "-" in (match[1], match[3]) else 1
    if body.startswith("(") and body.endswith(")") and body.count("(") == 1 and not match[1] + match[3]:
        return _read_prepared(body[1:-1].strip(), is_text, _MAX_STYLES)
    number = _read_body(body, is_text)
    if number is None or (number.is_percentage if match[2] else number.unit.startswith("/")):
        return None
    unit = f"{_CURRENCIES[match[2]]} {number.unit}" if match[2] else number.unit
    return number._replace(value=sign * number.value, unit=unit.strip().replace(" /", "/"))


def _read_body(text: str, is_text: bool) -> Number | None:
    """Return the number of the first matching form, with a unit or a modulus behind it."""
    for form in FORMS:
        if (match := form.pattern.match(text)) is None:
            continue
        rest = text[match.end() :]
        if form.name == "integer" and (modulus := _MODULUS.fullmatch(rest)) is not None:
            return _read_residue(int(re.sub("[, ]", "", match[0])), int(next(filter(None, modulus.groups()))))
        unit = NO_UNIT if not rest else parse_unit(rest, is_text)
        if unit is not None:
            value = form.read(match[0])
            return None if value is None else _make_number(value, unit, form.name, match[0])
    return None


def _make_number(value: Fraction, unit: Unit, form: str, text: str) -> Number:
    num_decimals = len(text.partition(".")[2]) if form == "decimal" and unit.factor == 1 else 0
    return Number(value * unit.factor, unit.name, form, num_decimals)


def _read_residue(residue: int, modulus: int) -> Number | None:
    return Number(Fraction(residue), suffix=f"mod {modulus}") if residue < modulus else None


def _read_base(match: re.Match[str]) -> Number | None:
    digits, name = (group for group in match.groups() if group is not None)
    base = _BASE_WORDS.get(name) or (int(name) if name.isdigit() else 0)
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in digits) or len(digits) > MAX_DIGITS // 4:
        return None
    return Number(Fraction(int(digits, base)), form="base", suffix=f"base {base}")


def has_digits(decimal: Number, based: Number) -> bool:
    """Return whether the digits of `decimal`, read in the base of `based`, give the value of `based`."""
    digits = str(decimal.value)
    base = int(based.suffix.removeprefix("base "))
    return all(digit.isdigit() and int(digit) < base for digit in digits) and int(digits, base) == based.value
