"""Nodes of a cluster on the loopback interface. Each has a folder of sockets and a copy of the address book."""

import asyncio
import itertools
import os
import socket
from pathlib import Path
from typing import Self

from asterism.bus.bus import Bus
from asterism.bus.transport.address_book import AddressBook, AddressEntry, Network, TcpAddress, write_address_book
from asterism.bus.transport.curve_auth import ClusterKey
from asterism.bus.transport.zeromq import open_zmq_bus

_ports = itertools.count(20_000 + os.getpid() % 100 * 120, 2)  # parallel test runs use other ports


def find_free_address(host: str) -> TcpAddress:
    """Return an address with two unused ports."""
    return next(TcpAddress(host, port) for port in _ports if _is_free(host, port) and _is_free(host, port + 1))


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


class Cluster:
    """A cluster as its launchers see it. Each change of the book is written to the copies of all nodes.

    The buses of its processes are closed at the end of the context.
    """

    def __init__(self, folder: Path, key: ClusterKey) -> None:
        self.key = key
        self.entries: dict[str, AddressEntry] = {}
        self.first_epoch = 0
        self._departed: list[str] = []
        self._joined: list[Bus] = []
        self._folder = folder

    def get_sockets(self, node: int) -> Path:
        folder = self._folder / f"node-{node}"
        folder.mkdir(exist_ok=True)
        return folder

    def add(self, node: int, *processes: str, address: TcpAddress | None = None) -> None:
        for process in processes:
            self.entries[process] = AddressEntry(address or find_free_address(f"127.0.0.{1 + node % 8}"), node)
        self._write()

    def remove(self, *processes: str) -> None:
        self._departed += processes
        self._write()

    def _write(self) -> None:
        for node in {entry.node for entry in self.entries.values()}:
            write_address_book(
                self.get_sockets(node), AddressBook(node, self.entries, self._departed, self.first_epoch)
            )

    def network(self, node: int, key: ClusterKey | None = None) -> Network:
        return Network(key or self.key, self.get_sockets(node))

    def join(self, process: str, epoch: int = 0, bound: int = 1000, network: Network | None = None) -> Bus:
        node = self.entries[process].node
        self._joined.append(open_zmq_bus(process, self.get_sockets(node), bound, epoch, network or self.network(node)))
        return self._joined[-1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(bus.close() for bus in self._joined))
