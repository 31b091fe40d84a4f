"""Rewrites an answer in plain LaTeX: one spelling for each symbol and each space, no styles around the answer."""

import re

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_MINUS_SIGNS = dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212, 0xFE63), "-")
_SPACE_SIGNS = dict.fromkeys((0xA0, *range(0x2002, 0x200B), 0x202F, 0x205F, 0x3000), " ")
_LATEX_SYMBOLS = {
    **{0xD7: "\\times ", 0xB7: "\\cdot ", 0x22C5: "\\cdot ", 0xF7: "\\div ", 0x221A: "\\sqrt ", 0x2205: "\\emptyset "},
    **{0x3C0: "\\pi ", 0x221E: "\\infty ", 0x2026: "\\dots ", 0xB0: "^\\circ ", 0x2032: "'", 0xFF0C: ",", 0x3002: "."},
}
_SYMBOLS = str.maketrans(_FULL_WIDTH | _MINUS_SIGNS | _SPACE_SIGNS | _LATEX_SYMBOLS)
_SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUPERSCRIPT = re.compile("\u207b?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_SMALL_FRACTIONS = {"\u00bd": "12", "\u2153": "13", "\u2154": "23", "\u00bc": "14", "\u00be": "34", "\u2155": "15"}
_SMALL_FRACTION = re.compile("[\u00bd\u2153\u2154\u00bc\u00be\u2155]")

_ELLIPSIS = re.compile(r"\\(?:[lc]dots|dots[bcmio]?)(?![a-zA-Z])|\.\.\.")
_LATEX_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~")
_TEXT_COMMANDS = (
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname|rm)(?![a-zA-Z])"
)
TEXT = re.compile(rf"{_TEXT_COMMANDS}\s*\{{([^{{}}]*)\}}")  # group 1: the content
_STYLE = re.compile(
    rf"(?:{_TEXT_COMMANDS}|\\(?:boldsymbol|bm|boxed|fbox|underline|hbox)(?![a-zA-Z]))\s*(?=\{{)|(?=\{{)"
)
_FRAMES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"))
_MAX_FRAMES = 4  # math delimiters around an answer


def prepare_math(text: str) -> str:
    """Return the text in the notation that math-verify reads."""
    text = text.strip().strip("$").strip()
    if text.endswith(".") and not text.endswith("\\."):
        text = text[:-1].rstrip()
    text = re.sub(r"(?<!\\)\$", "", replace_symbols(text))
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])", "", text).replace("\\varnothing", "\\emptyset")
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"(?<=\d)\.(?=\s*/)", "", text)  # 1./3
    text = re.sub(r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1", text)
    text = re.sub(r"\\sqrt\s*(\d+|[a-z])", r"\\sqrt{\1}", text)
    text = _ELLIPSIS.sub(r"\\dots ", text)
    return re.sub(r"(?<=\d)(?:\\[,!]|\{,\})+(?=\d{3}(?!\d))", "", text)


def prepare_number(text: str) -> str:
    """Return the text with uniform spaces, commas and fractions; separators between digits stay."""
    text = strip_frames(_LATEX_SPACE.sub(" ", replace_symbols(text)))
    text = re.sub(r"\\(?:left|right)\s*(?=[()\[\]|{}\\])|^\\(?:display|text)style(?![a-zA-Z])|(?<=,)\\!", "", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text).replace("{,}", ",")
    return " ".join(_ELLIPSIS.sub(r"\\dots ", text).split())


def replace_symbols(text: str) -> str:
    if text.isascii():
        return text
    text = _SMALL_FRACTION.sub(lambda match: f"\\frac{_SMALL_FRACTIONS[match[0]]}", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    return text.translate(_SYMBOLS)


def strip_frames(text: str) -> str:
    """Return the text without math delimiters around it and without a full stop behind it."""
    for _ in range(_MAX_FRAMES):
        text = text.strip()
        if text.endswith(".") and not text.endswith(("\\.", "..")):
            text = text[:-1].rstrip()
        for opening, closing in _FRAMES:
            inner = text[len(opening) : -len(closing)]
            if len(text) > len(opening + closing) and text == opening + inner + closing and opening not in inner:
                text = inner
                break
        else:
            return text
    return text


def strip_style(text: str) -> tuple[str, bool]:
    r"""Return the text without an enclosing style, such as `\mathbf{...}`, and whether this style was a text style."""
    match = _STYLE.match(text)
    if match is None or not text.endswith("}") or find_closing_brace(text, match.end()) != len(text) - 1:
        return text, False
    return text[match.end() + 1 : -1].strip(), TEXT.fullmatch(text) is not None


def find_closing_brace(text: str, opening: int) -> int:
    """Return the index of the brace that closes the brace at `opening`, or -1 if no brace does."""
    depth = 0
    for place in range(opening, len(text)):
        if text[place] in "{}" and (place == 0 or text[place - 1] != "\\"):
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return place
    return -1
