"""Where the processes of a cluster listen: the book, a file in each node's folder of sockets.

Every node has a copy of its own. The node's launcher writes it, before its processes begin and whenever it changes; the
processes look. A process never changes its address, nor its node, and who is gone never comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from bus.curve import ClusterKey, load_key
from bus.lanes import CONTROL, Lane
from configs.errors import UnusableInput

_BOOK = "book"
_NETWORK = "network"  # where the file with the cluster's key is


class Address(msgspec.Struct, frozen=True):
    host: str  # such as 10.0.0.7
    port: int  # of the control lane; the bulk lane's is the next one

    def of(self, lane: Lane) -> str:
        return f"tcp://{self.host}:{self.port if lane == CONTROL else self.port + 1}"


class Entry(msgspec.Struct, frozen=True):
    address: Address
    node: int


class Book(msgspec.Struct, frozen=True):
    node: int  # whose copy this is
    entries: dict[str, Entry]  # by process
    gone: list[str]  # processes that will not come back; what the entries say of them does not count
    first_session: int = 0  # of this launch of the run; who is in a lower one, but for 0, belongs to an earlier launch


def write_book(sockets: Path, book: Book) -> None:
    """Who reads it sees the whole of it, or the whole of the one before."""
    _replace(sockets / _BOOK, msgspec.json.encode(book))


def write_network(sockets: Path, key_file: Path) -> None:
    """Those whose sockets are in the folder belong to a cluster. Before they begin there is to be a book, too."""
    _replace(sockets / _NETWORK, str(key_file.resolve()).encode())


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    new.replace(path)


def network_of(sockets: Path) -> Network | None:
    """None where the processes of one machine are alone. Raises UnusableInput."""
    try:
        key_file = (sockets / _NETWORK).read_text()
    except FileNotFoundError:
        return None
    return Network(load_key(Path(key_file)), sockets)


class Network:
    """One process's view of the cluster: its key, and the book as it was when it was last looked at."""

    def __init__(self, key: ClusterKey, sockets: Path) -> None:
        """Raises UnusableInput where there is no book."""
        self.key = key
        self.watchers: list[Callable[[], None]] = []  # called when the book has changed
        self._path = sockets / _BOOK
        self._data = b""
        self._gone: frozenset[str] = frozenset()
        if not self.refresh():
            raise UnusableInput(f"{self._path}: there is no such file; the launcher of a node writes it")

    def refresh(self) -> bool:
        """Whether the book has changed. Raises UnusableInput for a file that is no book.

        Where it is gone, with the folder of a run that is over, what it said stays.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return False
        if data == self._data:
            return False
        try:
            self._book = msgspec.json.decode(data, type=Book)
        except msgspec.DecodeError as error:
            raise UnusableInput(f"{self._path}: this is no book: {error}") from error
        self._data, self._gone = data, frozenset(self._book.gone)
        for watcher in self.watchers:
            watcher()
        return True

    def entry(self, process: str) -> Entry | None:
        """None as long as it is not in the book, and when it is gone."""
        return None if process in self._gone else self._book.entries.get(process)

    def is_near(self, entry: Entry) -> bool:
        """Whether it is on this node, so that its ipc sockets are in the same folder."""
        return entry.node == self._book.node

    @property
    def gone(self) -> frozenset[str]:
        return self._gone

    @property
    def first_session(self) -> int:
        return self._book.first_session
