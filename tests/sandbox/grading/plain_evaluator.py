"""Evaluate the documented forms of a number (docs/grading.md) without the grader, by a scanner over characters.

The fuzz test compares this evaluator with the grader, so the evaluator imports neither the grader nor math-verify.
"""

from fractions import Fraction
from typing import NamedTuple

from tests.sandbox.grading.number_scanner import DIGITS, Scanner
from tests.sandbox.grading.plain_arithmetic import calculate, is_name

SPACES = (" ", "~", "\\,", "\\;", "\\:", "\\ ")
CHARACTERS = {"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\uff1d": "=", "\u00d7": "\\times "}
STYLES = (
    *("\\mathbf", "\\mathrm", "\\mathit", "\\mathsf", "\\text", "\\textbf", "\\textit", "\\textrm", "\\textnormal"),
    *("\\boldsymbol", "\\bm", "\\boxed", "\\fbox", "\\underline", "\\hbox", "\\mbox", "\\operatorname", "\\rm", ""),
)
FRAMES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))


class Value(NamedTuple):
    number: Fraction
    unit: str = ""  # one of "%", "dollar", "'" and "^\\circ"
    num_decimals: int = 0  # number of decimals of a plain decimal number
    is_fraction: bool = False
    base: int = 0
    modulus: int = 0


def evaluate(text: str, is_followed: bool = False) -> Value | None:
    """Return the value of a text in a documented form. If a unit follows (`is_followed`), the form has no frame."""
    for character, plain in CHARACTERS.items():
        text = text.replace(character, plain)
    scanner, plain = Scanner(text), ""
    while not scanner.is_at_end:
        plain += " " if scanner.take(*SPACES) else scanner.text[scanner.place]
        scanner.place += plain[-1] != " "
    text = plain
    if is_followed:
        text = _normalize(text)
        return _evaluate_number(text) or _evaluate_equation(text)
    return _evaluate_framed(text, 3)


def _normalize(text: str) -> str:
    for bracket in ("\\left", "\\right"):
        for opening in ("(", ")", "[", "]", "{", "}", "|", "\\", " (", " )"):
            text = text.replace(bracket + opening, opening.strip())
    for style in ("\\displaystyle", "\\textstyle"):
        if text.startswith(style) and not text[len(style) :][:1].isalpha():
            text = text.removeprefix(style)
    for name in ("\\dfrac", "\\tfrac", "\\cfrac"):
        text = text.replace(name, "\\frac")
    text = text.replace(",\\!", ",").replace("{,}", ",")
    for dots in ("\\ldots", "\\cdots", "\\dotsm", "\\dotsi", "\\dotso", "..."):
        before, found, after = text.partition(dots)
        if found and not (dots != "..." and after[:1].isalpha()):
            text = f"{before}\\dots {after}"
    return " ".join(text.split())


def _evaluate_framed(text: str, num_styles: int) -> Value | None:
    text = _normalize(_strip_frames(text))
    for style in STYLES:
        rest = text.removeprefix(style).lstrip() if text.startswith(style) else ""
        if rest.startswith("{") and _find_end(rest) == len(rest) - 1:
            return _evaluate_framed(rest[1:-1], num_styles - 1) if num_styles else None
    return _evaluate_number(text) or _evaluate_equation(text)


def _strip_frames(text: str) -> str:
    for _ in range(4):
        text = text.strip()
        if text.endswith(".") and not text.endswith(("..", "\\.")):
            text = text[:-1].rstrip()
        for opening, closing in FRAMES:
            inner = text[len(opening) : len(text) - len(closing)]
            if inner and text == opening + inner + closing and opening not in inner:
                text = inner
                break
        else:
            break
    return text


def _find_end(text: str) -> int:
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return place
    return -1


def _evaluate_number(text: str) -> Value | None:
    if (value := _evaluate_base(text)) is not None:
        return value
    scanner = Scanner(text)
    sign = scanner.sign()
    currency = scanner.spaced("\\$", "$")
    second = scanner.spaced("+", "-") or ""
    rest = text[scanner.place :]
    if sign and second:
        return None
    if rest.startswith("(") and rest.endswith(")") and rest.count("(") == 1 and not sign + second:
        value = _evaluate_number(rest[1:-1].strip())
    else:
        value = _evaluate_unsigned(rest)
    if value is None or (currency and value.unit == "%"):
        return None
    number = -value.number if "-" in sign + second else value.number
    return value._replace(number=number, unit="dollar" + value.unit if currency else value.unit)


def _evaluate_base(text: str) -> Value | None:
    scanner = Scanner(text)
    is_bracketed = scanner.take("(") is not None
    digits = scanner.digits()
    if not digits or (is_bracketed and not scanner.take(")")):
        return None
    if not scanner.spaced("_"):
        return None
    is_braced = scanner.spaced("{") is not None
    base = scanner.digits()
    if is_braced:
        scanner.take(" ")
        if not scanner.take("}"):
            return None
    if not scanner.is_at_end or not base or (not is_braced and len(base) > 2) or not 2 <= int(base) <= 16:
        return None
    if any(int(digit) >= int(base) for digit in digits):
        return None
    return Value(Fraction(int(digits, int(base))), base=int(base))


def _evaluate_unsigned(text: str) -> Value | None:
    for read in (_decimal, _mixed, _latex_fraction, _plain_fraction, _bracket_power, _power, _integer):
        scanner = Scanner(text)
        if (value := read(scanner)) is not None and (finished := _finish(scanner, value)) is not None:
            return finished
    return None


def _finish(scanner: Scanner, value: Value) -> Value | None:
    """Read a unit of one character, or a modulus, at the end of the text."""
    has_space = bool(scanner.take(" "))
    rest = scanner.text[scanner.place :].replace(" ", "")
    if has_space and rest.isalpha() and len(rest) > 2:
        return value._replace(unit=rest)
    if not rest:
        return value
    if rest in ("\\%", "%"):
        return value._replace(unit="%", num_decimals=0)
    if rest in ("'", "''", "^\\circ", "^{\\circ}"):
        return value._replace(unit=rest.replace("{", "").replace("}", ""))
    if value.is_fraction or value.num_decimals or value.number.denominator != 1:
        return None
    rest = scanner.text[scanner.place :].replace("( ", "(")
    for opening, closing in (
        *(("\\pmod", ""), ("\\bmod", ""), ("\\mod", ""), ("(mod ", ")"), ("(\\mod", ")"), ("(\\bmod", ")")),
        ("mod ", ""),
    ):
        if rest.startswith(opening) and rest.endswith(closing):
            modulus = rest.removeprefix(opening).removesuffix(closing).strip()
            if modulus.startswith("{") and modulus.endswith("}"):
                modulus = modulus[1:-1].strip()
            if modulus.isdigit() and value.number < int(modulus):
                return value._replace(modulus=int(modulus))
    return None


def _decimal(scanner: Scanner) -> Value | None:
    """Read a decimal, a repeating decimal, or a number times a power of ten."""
    whole = scanner.integer()
    if scanner.take("."):
        digits = scanner.digits()
        start = Fraction(int(f"{whole or 0}{digits}"), 10 ** len(digits))
        if (period := _period(scanner)) is not None:
            return Value(start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits)))
        if not digits:
            return None
        place = scanner.place
        scanner.take(" ")
        if scanner.take("\\dots"):
            return _ellipsis(whole or 0, digits)
        scanner.place = place
    elif whole is None:
        return None
    else:
        start, digits = Fraction(whole), ""
    place = scanner.place
    exponent = _power_of_ten(scanner)
    if exponent is not None:
        return Value(start * Fraction(10) ** exponent)
    scanner.place = place
    return Value(start, num_decimals=len(digits)) if digits else None


def _power_of_ten(scanner: Scanner) -> int | None:
    if scanner.take("e", "E"):
        sign, digits = scanner.sign(), scanner.digits()
        return int(sign + digits) if digits and int(digits) < 4000 else None
    if not (scanner.spaced("\\times", "\\cdot", "*", "\\ast", "\u00d7") and scanner.take("10") and scanner.spaced("^")):
        return None
    exponent = scanner.exponent()
    return exponent if exponent is not None and abs(exponent) < 4000 else None


def _period(scanner: Scanner) -> str | None:
    start = scanner.place
    if scanner.take("("):
        period = scanner.digits()
        is_closed = bool(scanner.take(")"))
    elif scanner.take("\\overline", "\\bar"):
        is_opened = bool(scanner.spaced("{"))
        period = scanner.digits()
        scanner.take(" ")
        is_closed = is_opened and bool(scanner.take("}"))
    elif scanner.take("\\dot"):
        scanner.take(" ")
        is_braced = bool(scanner.take("{"))
        period = scanner.text[scanner.place : scanner.place + 1]
        scanner.place += 1
        is_closed = period in DIGITS and (not is_braced or bool(scanner.take("}")))
    else:
        return None
    if not period or not is_closed:
        scanner.place = start
        return None
    return period


def _ellipsis(whole: int, digits: str) -> Value | None:
    for length in range(1, len(digits)):
        block = digits[-length:]
        times = 3 if length == 1 else 2
        if len(digits) >= times * length and digits[-times * length :] == block * times:
            start = Fraction(int(f"{whole}{digits}"), 10 ** len(digits))
            return Value(start + Fraction(int(block), (10**length - 1) * 10 ** len(digits)))
    return None


def _mixed(scanner: Scanner) -> Value | None:
    whole = scanner.digits()
    if not whole:
        return None
    has_space = bool(scanner.take(" "))
    if scanner.take("\\frac"):
        fraction = _read_sides(scanner, is_plain=True)
    elif has_space and (top := scanner.digits()):
        is_quotient = scanner.spaced("/")
        bottom = scanner.digits()
        fraction = Fraction(int(top), int(bottom)) if is_quotient and bottom and int(bottom) else None
    else:
        return None
    return Value(int(whole) + fraction) if fraction is not None and 0 < fraction < 1 else None


def _latex_fraction(scanner: Scanner) -> Value | None:
    value = _read_sides(scanner, is_plain=False) if scanner.take("\\frac") else None
    return Value(value, is_fraction=True) if value is not None else None


def _read_sides(scanner: Scanner, is_plain: bool) -> Fraction | None:
    start = scanner.place
    top = scanner.side()
    bottom = scanner.side() if top is not None else None
    if is_plain and any(character in "+-^," for character in scanner.text[start : scanner.place]):
        return None
    return top / bottom if top is not None and bottom else None


def _plain_fraction(scanner: Scanner) -> Value | None:
    top = scanner.power()
    scanner.take(".")
    if top is None or not scanner.spaced("/"):
        return None
    bottom = scanner.power()
    return Value(top / bottom, is_fraction=True) if bottom else None


def _bracket_power(scanner: Scanner) -> Value | None:
    r"""Read a signed whole number or a fraction in brackets with an exponent."""
    if not scanner.take("("):
        return None
    scanner.take(" ")
    sign = scanner.sign()
    if scanner.take("\\frac"):
        base = _read_sides(scanner, is_plain=True)
    else:
        whole = scanner.integer()
        bottom = Fraction(1)
        if scanner.spaced("/"):
            digits = scanner.digits()
            bottom = Fraction(int(digits)) if digits else Fraction(0)
        base = Fraction(whole) / bottom if whole is not None and bottom else None
    is_closed = scanner.spaced(")")
    if base is None or not is_closed or not scanner.spaced("^"):
        return None
    exponent = scanner.exponent()
    if exponent is None or abs(exponent) > 500 or (not base and exponent <= 0):
        return None
    return Value((-base if sign == "-" else base) ** exponent)


def _power(scanner: Scanner) -> Value | None:
    value = scanner.power()
    return Value(value) if value is not None and "^" in scanner.text[: scanner.place] else None


def _integer(scanner: Scanner) -> Value | None:
    value = scanner.integer()
    return Value(Fraction(value)) if value is not None else None


# ---------------------------------------------------------------- equations


def _evaluate_equation(text: str) -> Value | None:
    """Evaluate an equation: a name or arithmetic, an equals sign outside brackets, and a number."""
    sides, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "=" and not depth:
            sides.append("")
        else:
            sides[-1] += character
    if not 2 <= len(sides) <= 3:
        return None
    value = _evaluate_framed(sides[-1], 3) if sides[-1].strip() else None
    if value is None:
        return None
    for side in (side.replace("\\times", "*").strip() for side in sides[:-1]):
        if any(character.isalpha() for character in side):
            if not is_name(side):
                return None
        elif calculate(side) != (value.number / 100 if value.unit == "%" else value.number):
            return None
    return value
