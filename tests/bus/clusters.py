"""Nodes on the loopback interface, each with a folder of sockets and a copy of the book."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

from bus.book import Address, Book, Entry, Network, write_book
from bus.curve import ClusterKey
from bus.transport import Bus
from bus.zeromq import zmq_bus

_ports = itertools.count(20_000 + os.getpid() % 100 * 120, 2)  # apart from those of other test runs


def free_address(host: str) -> Address:
    """Two ports that nobody listens at."""
    return next(Address(host, port) for port in _ports if _is_free(host, port) and _is_free(host, port + 1))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class Cluster:
    """What its launchers know. A change is written to all copies of the book."""

    def __init__(self, folder: Path, key: ClusterKey) -> None:
        self.key = key
        self.entries: dict[str, Entry] = {}
        self.first_session = 0
        self._gone: list[str] = []
        self._folder = folder

    def sockets(self, node: int) -> Path:
        folder = self._folder / f"node-{node}"
        folder.mkdir(exist_ok=True)
        return folder

    def enter(self, node: int, *processes: str, address: Address | None = None) -> None:
        for process in processes:
            self.entries[process] = Entry(address or free_address(f"127.0.0.{1 + node % 8}"), node)
        self._write()

    def lose(self, *processes: str) -> None:
        self._gone += processes
        self._write()

    def _write(self) -> None:
        for node in {entry.node for entry in self.entries.values()}:
            write_book(self.sockets(node), Book(node, self.entries, self._gone, self.first_session))

    def network(self, node: int, key: ClusterKey | None = None) -> Network:
        return Network(key or self.key, self.sockets(node))

    def join(self, process: str, session: int = 0, bound: int = 1000, network: Network | None = None) -> Bus:
        node = self.entries[process].node
        return zmq_bus(process, self.sockets(node), bound, session, network or self.network(node))
