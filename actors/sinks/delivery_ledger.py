"""The ledger of one sink records the lines of metrics.jsonl that were sent to the backend, and the delivered ones.

Entries are JSON lines, only appended. metrics.jsonl is the source: a line that the ledger lacks is sent, and a line
that was sent, but not delivered, is sent again under its number. A resumed run removes lines and repeats their steps;
the ledger then marks all RL lines from the first such step on as replaced.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from asterism.actors.sinks.metric_records import get_axis
from asterism.configs.errors import UnusableInput


class Sent(msgspec.Struct, frozen=True, tag="sent", array_like=True):
    """An entry that precedes the sending of a line. The line's number counts the earlier `Sent` entries."""

    kind: str
    step: int
    digest: str  # digest of the line


class Delivered(msgspec.Struct, frozen=True, tag="delivered", array_like=True):
    below: int  # all lines with a smaller number are delivered


class Replaced(msgspec.Struct, frozen=True, tag="replaced", array_like=True):
    """An entry that invalidates all sent RL lines of this step and later ones."""

    from_step: int


class NumberedLine(msgspec.Struct, frozen=True):
    number: int
    line: bytes


class DeliveryLedger:
    def __init__(self, path: Path) -> None:
        """Read the ledger; as a context manager it can also be written."""
        self._path = path
        self._file: FileIO | None = None
        self._load()

    def __enter__(self) -> Self:
        """Lock the ledger. Raises UnusableInput if another process writes it."""
        self._path.parent.mkdir(exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UnusableInput(f"{self._path}: another process delivers to this sink; wait until it ends") from None
        self._file.truncate(self._load())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def find_repeated_step(self, lines: Sequence[bytes]) -> int | None:
        """Return the first RL step that a resumed run repeats, or None if all sent lines are in metrics.jsonl."""
        present = set(map(compute_digest, lines))
        lost = [self._sent[number] for digest, number in self._numbers.items() if digest not in present]
        steps = [sent.step for sent in lost if get_axis(sent.kind) == "rl"]
        return min(steps, default=None)

    def enter_replaced(self, step: int) -> None:
        """Mark the sent records of RL steps from `step` on as replaced."""
        self._append(Replaced(step))

    def enter_unsent(self, lines: Iterable[bytes]) -> list[NumberedLine]:
        """Enter the lines that are not yet sent as sent, and return them with their numbers."""
        unsent: list[NumberedLine] = []
        for line in lines:
            digest = compute_digest(line)
            if digest not in self._numbers:
                fields = msgspec.json.decode(line)
                self._append(Sent(fields["kind"], fields["step"], digest))
                unsent.append(NumberedLine(self._numbers[digest], line))
        return unsent

    def select_undelivered(self, lines: Iterable[bytes]) -> list[NumberedLine]:
        """Return the lines that are sent, but not delivered, in the order of their numbers."""
        numbered = ((self._numbers.get(compute_digest(line), -1), line) for line in lines)
        return [NumberedLine(number, line) for number, line in sorted(numbered) if number >= self._num_delivered]

    def mark_delivered(self) -> None:
        if self._num_delivered < len(self._sent):
            self._append(Delivered(len(self._sent)))

    def count_undelivered(self, lines: Iterable[bytes]) -> int:
        numbers = (self._numbers.get(compute_digest(line)) for line in lines)
        return sum(number is None or number >= self._num_delivered for number in numbers)

    def _load(self) -> int:
        """Return the number of bytes of complete lines; a kill may leave an incomplete line. Raises UnusableInput."""
        self._sent: list[Sent] = []
        self._numbers: dict[str, int] = {}  # numbers of valid lines, by digest
        self._num_delivered = 0
        content = self._path.read_bytes() if self._path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        try:
            for line in complete.splitlines():
                self._apply(msgspec.json.decode(line, type=Sent | Delivered | Replaced))
        except msgspec.MsgspecError as error:
            raise UnusableInput(f"{self._path}: damaged ({error}); delete it to send all records again") from None
        return len(complete)

    def _append(self, entry: Sent | Delivered | Replaced) -> None:
        """Append the entry. Raises OSError on a full disk, also if the disk has space for a part of the entry."""
        assert self._file is not None
        line = msgspec.json.encode(entry) + b"\n"
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._apply(entry)

    def _apply(self, entry: Sent | Delivered | Replaced) -> None:
        match entry:
            case Sent(digest=digest):
                self._numbers[digest] = len(self._sent)
                self._sent.append(entry)
            case Delivered(below=below):
                self._num_delivered = below
            case Replaced(from_step=from_step):
                for digest, number in list(self._numbers.items()):
                    sent = self._sent[number]
                    if get_axis(sent.kind) == "rl" and sent.step >= from_step:
                        del self._numbers[digest]


def compute_digest(line: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(line)
