"""Saves conversations as rows of chat messages (JSON lines), which a cold start and `asterism data` read.

An assistant's content is the text that the model generated, with the prefill and its calls; results have the role `tool`.
So the cold start gives a row the token ids of the conversation. A reader of `messages` needs nothing else.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from actors.cli.chat.chat_session import Message
from configs.errors import UnusableInput


def build_row(messages: Sequence[Message], system: str, task: str) -> dict[str, object] | None:
    """Up to the last message of the assistant; None without one."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        return None
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": [*first, *messages[: last + 1]], **({"task": task} if task else {})}


class TranscriptFile:
    """Appends to the file a row for each conversation; the row of the current one is replaced as it grows."""

    def __init__(self, path: Path, option: str) -> None:
        """`option` names the file in messages. Raises UnusableInput if it cannot be written."""
        self._option = f"{option} {path}"
        try:
            self._file = path.open("r+b" if path.exists() else "w+b")
            self._end_last_line()
            self._start = self._file.tell()  # of the current conversation's row
        except OSError as error:
            raise UnusableInput(f"{self._option}: {error.strerror}") from None

    def _end_last_line(self) -> None:
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def save(self, row: dict[str, object] | None) -> None:
        """Raises UnusableInput, for example on a full disk."""
        line = b"" if row is None else msgspec.json.encode(row) + b"\n"
        try:
            self._file.seek(self._start)
            self._file.write(line)
            self._file.truncate()
            self._file.flush()
        except OSError as error:
            raise UnusableInput(f"{self._option}: {error.strerror}") from None

    def end_conversation(self) -> None:
        """The next row follows the last one."""
        self._start = self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()
