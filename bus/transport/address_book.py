"""The address book of a cluster: the address of each process, in a file in each node's folder of sockets.

The launcher of each node writes the node's copy before it starts processes, and after each change;
the processes poll it. The address and the node of a process never change, and a departed process
never returns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from asterism.bus.lanes import CONTROL, Lane
from asterism.bus.transport.curve_auth import ClusterKey, load_key
from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import UnusableInput

_BOOK_FILE = "book"
_KEY_LOCATION_FILE = "network"  # contains the path of the cluster's key file


class TcpAddress(msgspec.Struct, frozen=True):
    host: str  # address, such as 10.0.0.7
    port: int  # port of the control lane; the bulk lane has the next port

    def format_endpoint(self, lane: Lane) -> str:
        return f"tcp://{self.host}:{self.port if lane == CONTROL else self.port + 1}"


class AddressEntry(msgspec.Struct, frozen=True):
    address: TcpAddress
    node: int


class AddressBook(msgspec.Struct, frozen=True):
    node: int  # node that owns this copy
    entries: dict[str, AddressEntry]  # entries by process
    departed: list[str]  # processes that will not return; their entries are ignored
    first_epoch: int = 0  # processes with a lower epoch, other than 0, belong to an earlier launch


def write_address_book(sockets: Path, book: AddressBook) -> None:
    write_atomically(sockets / _BOOK_FILE, msgspec.json.encode(book))


def write_key_location(sockets: Path, key_file: Path) -> None:
    """Write the key's path. Processes with sockets in this folder then belong to a cluster and need a book."""
    write_atomically(sockets / _KEY_LOCATION_FILE, str(key_file.resolve()).encode())


def load_network(sockets: Path) -> Network | None:
    """Return the network; None if the run has only one node. Raises UnusableInput."""
    try:
        key_file = (sockets / _KEY_LOCATION_FILE).read_text()
    except FileNotFoundError:
        return None
    return Network(load_key(Path(key_file)), sockets)


class Network:
    """One process's view of the cluster: the key, and the book at the last poll."""

    def __init__(self, key: ClusterKey, sockets: Path) -> None:
        """Read the book. Raises UnusableInput if there is no book."""
        self.key = key
        self.change_callbacks: list[Callable[[], None]] = []  # called after each change of the book
        self._path = sockets / _BOOK_FILE
        self._book_bytes = b""
        self._departed: frozenset[str] = frozenset()
        if not self.refresh():
            raise UnusableInput(f"{self._path}: no such file; the launcher of the node writes it")

    def refresh(self) -> bool:
        """Return whether the book has changed. Raises UnusableInput for an invalid file.

        If the file was deleted with the folder of a finished run, the last content stays valid.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return False
        if data == self._book_bytes:
            return False
        try:
            self._book = msgspec.json.decode(data, type=AddressBook)
        except msgspec.DecodeError as error:
            raise UnusableInput(f"{self._path}: not a valid address book: {error}") from error
        self._book_bytes, self._departed = data, frozenset(self._book.departed)
        for callback in self.change_callbacks:
            callback()
        return True

    def find_entry(self, process: str) -> AddressEntry | None:
        """Return the entry; None if the process is not in the book yet, or has departed."""
        return None if process in self._departed else self._book.entries.get(process)

    def is_local(self, entry: AddressEntry) -> bool:
        """Return whether the process is on this node, so that its ipc sockets are in the same folder."""
        return entry.node == self._book.node

    @property
    def departed(self) -> frozenset[str]:
        return self._departed

    @property
    def first_epoch(self) -> int:
        return self._book.first_epoch
