"""Generate numbers in the documented forms of text, and change one character of each text."""

from collections.abc import Iterator
from fractions import Fraction
from random import Random
from typing import NamedTuple

CHARACTERS = "0123456789.,+-*/^_{}()[]\\ $%'!|=<>:;~&#aexpimoE\u00d7\u2212\uff1d\u2013"
UNITS = ("", "", "", "", "\\text{ cm}", " km/h", "\\%", "^\\circ", " apples", "\\text{ dollars}", "\\,\\mathrm{m/s^2}")


class Mutation(NamedTuple):
    truth: str
    value: Fraction  # value of the truth
    number: str  # the changed number, without its unit
    unit: str


def generate_mutations(count: int, seed: int) -> Iterator[Mutation]:
    random = Random(seed)
    for _ in range(count):
        text, value, is_closed = random.choice(_FORMS)(random)
        unit = "" if is_closed else random.choice(UNITS)
        truth = str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        number = _change(text, random)
        yield Mutation(truth + unit, value, number, "" if number.endswith("\\") else unit)


def _change(text: str, random: Random) -> str:
    place = random.randrange(len(text) + 1)
    match random.choice(("delete", "insert", "change", "double")):
        case "delete":
            return text[:place] + text[place + 1 :]
        case "insert":
            return text[:place] + random.choice(CHARACTERS) + text[place:]
        case "double":
            return text[:place] + text[max(place - 1, 0) :]
        case _:
            return text[:place] + random.choice(CHARACTERS) + text[place + 1 :]


Generated = tuple[str, Fraction, bool]  # text, value, and whether the text must be the end of the answer


def _whole(random: Random) -> Generated:
    value = random.randint(-999, 10 ** random.randint(1, 9))
    minus = random.choice("-\u2212\u2013")
    return str(value).replace("-", minus), Fraction(value), False


def _grouped(random: Random) -> Generated:
    value = random.randint(1000, 10**9)
    separator = random.choice((",", "{,}", "\\,", " ", ",\\!", "~"))
    return f"{value:,}".replace(",", separator), Fraction(value), False


def _decimal(random: Random) -> Generated:
    digits = random.randint(1, 6)
    value = random.randint(1, 10**8)
    whole, rest = divmod(value, 10**digits)
    return f"{whole}.{rest:0{digits}d}", Fraction(value, 10**digits), False


def _scientific(random: Random) -> Generated:
    value, power = Fraction(random.randint(1, 999), 100), random.randint(-9, 9)
    mantissa = f"{float(value):.2f}"
    form = random.choice(("%s\\times10^{%d}", "%s \\times 10^{%d}", "%se%d", "%s\\cdot 10^{%d}", "%s*10^%d"))
    return form % (mantissa, power), value * Fraction(10) ** power, False


def _fraction(random: Random) -> Generated:
    top, bottom = random.randint(1, 200), random.randint(2, 200)
    if Fraction(top, bottom).denominator == 1:
        bottom = 2 * top + 1
    form = random.choice(("\\frac{%d}{%d}", "\\dfrac{%d}{%d}", "%d/%d", "-\\frac{%d}{%d}", "\\frac{%d}{%d}"))
    value = Fraction(top, bottom)
    return form % (top, bottom), -value if form.startswith("-") else value, False


def _short_fraction(random: Random) -> Generated:
    top, bottom = random.choice(((1, 2), (3, 4), (5, 7), (2, 9), (7, 8)))
    form = random.choice(("\\frac%d%d", "\\frac{%d}%d", "\\frac%d{%d}", "\\tfrac %d%d"))
    return form % (top, bottom), Fraction(top, bottom), False


def _mixed(random: Random) -> Generated:
    whole, bottom = random.randint(1, 99), random.randint(2, 60)
    top = random.randint(1, bottom - 1)
    form = random.choice(("%d\\frac{%d}{%d}", "%d \\frac{%d}{%d}", "%d %d/%d", "-%d\\frac{%d}{%d}"))
    value = whole + Fraction(top, bottom)
    return form % (whole, top, bottom), -value if form.startswith("-") else value, False


def _power(random: Random) -> Generated:
    base, exponent = random.randint(2, 12), random.randint(-9, 20)
    form = random.choice(("%d^{%d}", "%d^%d", "%d^{ %d }"))
    return form % (base, exponent), Fraction(base) ** exponent, False


def _fraction_power(random: Random) -> Generated:
    top, bottom, exponent = random.randint(1, 6), random.choice((7, 11, 13)), random.randint(2, 6)
    form = random.choice(("\\left(\\frac{%d}{%d}\\right)^{%d}", "(%d/%d)^%d", "(\\frac{%d}{%d})^{%d}"))
    return form % (top, bottom, exponent), Fraction(top, bottom) ** exponent, False


def _power_below(random: Random) -> Generated:
    top, base, exponent = random.choice((1, 5, 7)), random.choice((2, 3)), random.randint(2, 60)
    form = random.choice(("\\frac{%d}{%d^{%d}}", "%d/%d^{%d}"))
    return form % (top, base, exponent), Fraction(top, base**exponent), False


def _repeating(random: Random) -> Generated:
    whole, start, length = random.randint(0, 20), random.choice(("", "0", "25")), random.randint(1, 4)
    period = f"{random.randint(1, 10**length - 1):0{length}d}"
    value = Fraction(int(f"{whole}{start}"), 10 ** len(start))
    value += Fraction(int(period), (10**length - 1) * 10 ** len(start))
    form = random.choice(("%d.%s\\overline{%s}", "%d.%s(%s)", "%d.%s\\bar{%s}"))
    return form % (whole, start, period), value, False


def _ellipsis(random: Random) -> Generated:
    whole, block = random.randint(0, 20), random.choice(("3", "36", "142857", "01", "6"))
    value = whole + Fraction(int(block), 10 ** len(block) - 1)
    dots = random.choice(("...", "\\ldots", "\\dots"))
    return f"{whole}.{block * 3}{dots}", value, False


def _framed(random: Random) -> Generated:
    value = random.randint(10, 9999)
    form = random.choice(
        ("$%d$", "\\(%d\\)", "\\boxed{%d}", "\\mathbf{%d}", "\\text{%d}", "\\left(%d\\right)", "{%d}", "**%d**", "%d.")
    )
    return form % value, Fraction(value), True


def _named(random: Random) -> Generated:
    value = random.randint(-50, 9999)
    form = random.choice(("x=%d", "n = %d", "n_{\\max}=%d", "f(x, y)=%d", "|AB| = %d", "a_{3}\\,=\\,%d"))
    return form % value, Fraction(value), True


def _calculated(random: Random) -> Generated:
    first, second, third = (random.randint(1, 60) for _ in range(3))
    return random.choice(
        (
            (f"{first}+{second}={first + second}", Fraction(first + second), True),
            (f"{first}*{second}-{third} = {first * second - third}", Fraction(first * second - third), True),
            (f"({first}+{second})^2={(first + second) ** 2}", Fraction((first + second) ** 2), True),
            (f"{first * second}/{second}={first}", Fraction(first), True),
        )
    )


def _residue(random: Random) -> Generated:
    modulus = random.randint(3, 40)
    residue = random.randrange(modulus)
    form = random.choice(("%d \\pmod{%d}", "%d \\pmod %d", "%d \\bmod %d", "%d (mod %d)"))
    return form % (residue, modulus), Fraction(residue), True


def _money(random: Random) -> Generated:
    cents = random.randint(1, 99999)
    form = random.choice(("\\$%d.%02d", "$%d.%02d", "-\\$%d.%02d"))
    value = Fraction(cents, 100)
    return form % divmod(cents, 100), -value if form.startswith("-") else value, True


_FORMS = (
    *(_whole, _grouped, _decimal, _scientific, _fraction, _short_fraction, _mixed, _power, _fraction_power),
    *(_power_below, _repeating, _ellipsis, _framed, _named, _calculated, _residue, _money),
)
