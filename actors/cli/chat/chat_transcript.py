"""Transcripts save conversations as rows of chat messages (JSON lines), which a cold start and `asterism data` read.

An assistant's content is the text that the model generated, with the prefill and its calls; results are of role `tool`.
A cold start thus gives a row the token ids of the conversation. A reader needs no column but `messages`.
"""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asterism.actors.cli.chat.chat_session import Message
from asterism.configs.errors import UnusableInput


def build_row(messages: Sequence[Message], system: str, task: str) -> dict[str, object] | None:
    """Build the row, up to the assistant's last message, or return None without such a message."""
    last = max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        return None
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": [*first, *messages[: last + 1]], **({"task": task} if task else {})}


class TranscriptFile:
    """A file that gets a row for each conversation; the row of the current conversation is replaced as it grows."""

    def __init__(self, path: Path, option: str) -> None:
        """Open and lock the file. `option` names the file in messages. Raises UnusableInput if it is not writable."""
        self._option = f"{option} {path}"
        try:
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._end_last_line()
            self._start = self._file.tell()  # position of the current conversation's row
            self._row = b""
        except BlockingIOError:
            self._file.close()
            raise UnusableInput(f"{self._option}: another chat writes this file; name another one") from None
        except OSError as error:
            raise UnusableInput(f"{self._option}: {error.strerror}") from None

    def _end_last_line(self) -> None:
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def save(self, row: dict[str, object] | None) -> None:
        """Replace the row. Raises UnusableInput, for example on a full disk, and then keeps the former row."""
        line = b"" if row is None else msgspec.json.encode(row) + b"\n"
        try:
            self._replace_row(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._replace_row(self._row)
            raise UnusableInput(f"{self._option}: {error.strerror}") from None
        self._row = line

    def _replace_row(self, line: bytes) -> None:
        self._file.seek(self._start)
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._file.truncate()

    def end_conversation(self) -> None:
        """Keep the current row; the next one follows it."""
        self._start, self._row = self._file.seek(0, os.SEEK_END), b""

    def close(self) -> None:
        self._file.close()
