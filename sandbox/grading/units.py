"""Reads the unit behind a number: a scale word is a factor, and a unit has one name for all of its spellings."""

import re
from fractions import Fraction
from typing import NamedTuple

from asterism.sandbox.grading.notation import TEXT

PERCENT = "%"
MAX_UNIT_CHARACTERS = 200
_MAX_WORDS = 8

_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SPELLINGS = (
    *("mm millimeter millimetre", "cm centimeter centimetre", "dm decimeter decimetre", "m meter metre"),
    *("km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram gm"),
    *("kg kilogram", "lb lbs pound", "oz ounce", "ml milliliter millilitre", "l liter litre", "gal gallon", "qt quart"),
    *("ms millisecond", "s sec second", "min minute", "h hr hrs hour", "day", "wk week", "month", "yr yrs year"),
    *("dollar usd buck", "cent", "euro eur", "yen", "rupee", "degree deg", "rad radian", "c celsius", "f fahrenheit"),
    *("j joule", "kj kilojoule", "n newton", "w watt", "kw kilowatt", "pa pascal", "hz hertz", "khz", "v volt"),
    *("a amp ampere", "mol mole", "k kelvin", "ev", "ohm", "t tesla", "people person", "men man", "women woman"),
    *("% percent pct percentage",),
)
_NAMES = {spelling: words.split()[0] for words in _SPELLINGS for spelling in words.split()}
_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h", "kmh": "km/h", "sqft": "ft^2", "cc": "cm^3"}
_CASED = re.compile(r"[mM](?:W|Hz|J|g|V|A|Pa|N|eV)")  # prefixes that differ in case: milli and mega
# Words that change the number or name another number; they are no units.
_VALUE_WORD_LINES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half halves third",
    "thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth",
    "tenths hundredth hundredths thousandth thousandths millionth millionths plus minus times divided over",
    "root factorial mod modulo pi infinity infinite inf negative positive or and not no never nor is are was",
    "wrong false incorrect more less fewer least most than about approximately below above under between to",
    "up down sin cos tan log exp sqrt gcd lcm max mid base remainder power pm am squareroot double twice",
    "triple thrice pow abs floor ceil div frac undefined unknown else",
)
_VALUE_WORDS = frozenset(word for line in _VALUE_WORD_LINES for word in line.split())
_POWERS_BEFORE = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_POWERS_AFTER = {"squared": "^2", "cubed": "^3"}
_WORD = re.compile(r"[A-Za-z\u00b5\u03a9]+|%")
_TOKEN = re.compile(r"(?P<word>[A-Za-z\u00b5\u03a9]+|%)\.?(?P<power>\^-?\d)?|(?P<slash>/)|(?P<open>\()|(?P<close>\))")
_DEGREE = re.compile(r"(?:\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degrees?(?![a-zA-Z]))")
_QUOTIENT = re.compile(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}")
_BETWEEN_TEXTS = re.compile(r"(?:[\s/()]|\^-?\d|degree [CFK]?)*")


class Unit(NamedTuple):
    name: str = ""  # name with one spelling; "" for no unit
    factor: Fraction = Fraction(1)  # factor of the scale words


NO_UNIT = Unit()


def parse_unit(text: str, is_text: bool = False) -> Unit | None:
    r"""Return the unit if `text` is only a unit, or None.

    Symbols of one letter are units only in `\text` (also if `is_text`): a plain `m` may be a variable.
    """
    if not text.strip():
        return NO_UNIT
    if len(text) > MAX_UNIT_CHARACTERS or text.count("(") != text.count(")"):
        return None
    plain = re.sub(r"\^ ?\{ ?(-?\d) ?\}", r"^\1", text.replace("\\%", "%"))
    plain = re.sub(r"(?i)\bper cent\b", "percent", plain).replace("\\Omega", "ohm")
    plain = re.sub(r"\\mu(?![a-zA-Z]) ?", "\u00b5", plain)
    plain, num_degrees = _DEGREE.subn(" degree ", plain)
    if plain.strip() in ("'", "''"):
        return Unit("minute of arc" if plain.strip() == "'" else "second of arc")
    flat = TEXT.sub(lambda match: f" {match[1].strip()}", plain)
    is_marked = is_text or num_degrees > 0 or flat != plain
    if (
        flat != plain
        and _BETWEEN_TEXTS.fullmatch(_QUOTIENT.sub(" ", TEXT.sub(" ", plain).replace("\\cdot", " "))) is None
    ):
        return None  # a letter outside the text commands
    if flat != plain:
        flat = _QUOTIENT.sub(r" \1 / \2 ", flat.replace("\\cdot", " "))
    if flat.lstrip("(")[:1].isalpha() and not _is_known(flat):
        return None  # a product, such as 5x or 5(abc)
    return _name_unit(flat, is_marked)


def _is_known(flat: str) -> bool:
    match = _WORD.match(flat)
    return (
        match is not None
        and len(match[0]) > 1
        and (match[0][0] == "\u00b5" or match[0].lower() in _NAMES or match[0].lower() in _COMPOUNDS)
    )


def _name_unit(flat: str, is_marked: bool) -> Unit | None:
    """Return the unit of a text without commands. After "per" or a slash, words are in the denominator."""
    factor, names, place, power, is_below = Fraction(1), list[str](), 0, "", False
    for match in _TOKEN.finditer(flat):
        if flat[place : match.start()].strip():
            return None
        place = match.end()
        word = match["word"] or ""
        if not word or word.lower() == "per":
            is_below |= match[0] not in ("(", ")")
        elif not _is_unit_word(word, is_marked or is_below) or (
            match["power"] and not is_marked and not _is_known(word)
        ):
            return None
        elif (scale := _SCALES.get(word.lower().rstrip("s"))) is not None:
            if names:
                return None
            factor *= scale
        elif word.lower() in _POWERS_AFTER:
            if not names:
                return None
            names[-1] += _POWERS_AFTER[word.lower()]
        elif word.lower() in _POWERS_BEFORE:
            power = _POWERS_BEFORE[word.lower()]
        else:
            names.append(("/" if is_below else "") + _find_name(word) + (match["power"] or power))
            power = ""
    if flat[place:].strip() or len(names) > _MAX_WORDS or power or not (names or factor != 1):
        return None
    if PERCENT in names and len(names) > 1:
        return None
    return Unit(" ".join(names).replace(" /", "/"), factor)


def _is_unit_word(word: str, is_marked: bool) -> bool:
    lower = word.lower()
    if lower in _VALUE_WORDS:
        return False
    if len(word) == 1 and word != PERCENT:
        return is_marked and (lower in _NAMES or word in "\u00b5\u03a9d")
    return (
        len(word) > 2
        or is_marked
        or word[0] == "\u00b5"
        or lower in _NAMES
        or lower in _COMPOUNDS
        or lower in _POWERS_BEFORE
    )


def _find_name(word: str) -> str:
    if _CASED.fullmatch(word) is not None:
        return word
    lower = word.lower()
    singular = lower[:-1] if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss") else lower
    return _NAMES.get(lower) or _NAMES.get(singular) or _COMPOUNDS.get(lower) or singular
