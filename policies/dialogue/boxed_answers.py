"""Finds the boxed answer of a text.

A box is `\\boxed` or `\\fbox`, optional blanks, and a group in braces. A number after blanks replaces the group, as in
`\\boxed 5`, if a word or the end of the line, formula or text follows. Escaped braces (`\\{`, `\\}`) are part of the
content and no delimiters. A number before other signs, as in `\\boxed 5 + 3`, is an unreadable box. Other uses of the
words are no box.
"""

import re
from typing import NamedTuple

_BOX = r"\\?\\(?:boxed|fbox)"  # `\\boxed` can follow a line break (`\\`)
# No possessive group: Python 3.11.0 to 3.11.4 lets it keep a comma that no three digits follow.
_NUMBER = r"[-+\u2212]?(?:[0-9]++(?:,[0-9]{3})*(?:\.[0-9]++)?|\.[0-9]++)(?:/[0-9]++)?"
_END = r"(?=[.,;:!]?(?:\s*+(?:\$|\\[)\]]|<|\Z)|[^\S\n]*+\n|\s++[^\W\d_]))"
# The order of the alternatives matters: an escaped character is no brace.
_TOKEN = re.compile(
    rf"(?P<box>{_BOX}\s*+\{{)"
    rf"|{_BOX}\s++(?P<number>{_NUMBER}){_END}"
    rf"|(?P<unread>{_BOX}\s++[-+\u2212.]?[0-9])"
    r"|\\."
    r"|(?P<open>\{)"
    r"|(?P<close>\})",
    re.DOTALL,
)


class _Box(NamedTuple):
    begin: int  # start of the content
    end: int | None  # end of the content; None: the box is cut or unreadable


def extract_last_boxed(text: str) -> str | None:
    """Return the content of the box that begins last, or None if that box is absent, cut or unreadable. One pass."""
    last: _Box | None = None
    open_braces: list[tuple[int, bool]] = []  # (position of the content, whether a box precedes the brace)
    for token in _TOKEN.finditer(text):
        if token["number"]:
            last = _Box(*token.span("number"))
        elif token["box"] or token["unread"]:
            last = _Box(token.end(), None)
        if token["box"] or token["open"]:
            open_braces.append((token.end(), token["box"] is not None))
        elif token["close"] and open_braces:
            begin, is_box = open_braces.pop()
            if is_box and last is not None and begin == last.begin:
                last = _Box(begin, token.start())
    return None if last is None or last.end is None else text[last.begin : last.end]
