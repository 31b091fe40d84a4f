r"""This reader returns the user's messages: lines, lines that end in a backslash, and blocks between triple quotes.

    > one line
    > a line that \
    . goes to the next one
    > \"""
    . any text, with
    . several lines
    . \"""
"""

import contextlib
import importlib
import sys
from collections.abc import Callable

PROMPT, CONTINUATION = "> ", ". "
_QUOTES = '"""'


class MessageReader:
    def __init__(self, read_line: Callable[[str], str] = input, *, is_interactive: bool | None = None) -> None:
        """`read_line` gets the prompt and returns a line. The default is the standard input."""
        self._read_line = read_line
        self.is_interactive = sys.stdin.isatty() if is_interactive is None else is_interactive
        if self.is_interactive:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # `input` then has a line editor with a history

    def read(self) -> str | None:
        """Return the next message that is not blank, or None at the end of the input. Raises KeyboardInterrupt."""
        while (text := self._read_message()) is not None:
            if text.strip():
                return text
        return None

    def _read_message(self) -> str | None:
        line = self._next_line(PROMPT)
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            return self._read_block(line.lstrip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            if (following := self._next_line(CONTINUATION)) is None:
                break
            lines.append(following)
        return "\n".join(lines)

    def _read_block(self, first: str) -> str:
        """Read up to a line that ends in triple quotes, or to the end of the input."""
        lines = [first]
        while not lines[-1].rstrip().endswith(_QUOTES):
            if (following := self._next_line(CONTINUATION)) is None:
                return "\n".join(lines)
            lines.append(following)
        return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n")

    def _next_line(self, prompt: str) -> str | None:
        try:
            line = self._read_line(prompt if self.is_interactive else "")
        except EOFError:
            return None
        return clean_text(line)


def clean_text(text: str) -> str:
    """Replace the surrogates, which stand for bytes that are not UTF-8."""
    return text.encode(errors="replace").decode()
