"""Transport over ZeroMQ: for each lane, every process binds one ROUTER and opens one DEALER to each that it sends to.

Parcels go from DEALER to ROUTER, acknowledgements back. What is not acknowledged is held by bus.links, so that a broken
connection loses nothing, and ZeroMQ's own queues are short.

The sockets are drained on their file descriptors by the event loop itself, many frames a wake-up: ready-made asyncio
sockets take a future a frame and reach a quarter of the rate.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import zmq

from bus.book import Address, Network
from bus.curve import Doorkeeper, guard, unlock
from bus.lanes import CONTROL, LANES, Lane
from bus.links import Limits, Links
from bus.parcels import (
    MAX_PARCEL_BYTES,
    Ack,
    MalformedParcel,
    Parcel,
    decode_ack,
    decode_parcel,
    encode_ack,
    encode_parcel,
)
from bus.transport import Bus, Inbox
from configs.errors import UnusableInput

_LINGER_MS = 500  # how long closing waits for answers that are not yet written
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
_QUEUE_PARCELS = 64  # of ZeroMQ, at either end of a connection
_READ_AT_ONCE = 1024  # frames taken in one turn of the loop, so that other callbacks get theirs
_MAX_SOCKETS = 65_536
_LOOK_S = 0.25  # between two looks at the book

Socket = zmq.Socket[bytes]


def zmq_bus(process: str, sockets: Path, queue_messages: int, session: int = 0, network: Network | None = None) -> Bus:
    """A bus between processes of one machine; `sockets` is the folder that holds their ipc sockets.

    With a network it reaches those in its book, on this node or another one, and listens where the book says; for who is
    not in it yet, frames wait. Must be called from within a running event loop. Raises UnusableInput where the process
    cannot listen.
    """
    own = None if network is None else network.entry(process)
    if network is not None and own is None:
        raise UnusableInput(
            f"{process} is not in the book in {sockets}, so there is no address at which it could listen"
        )
    inbox = Inbox(queue_messages)
    links = Links(process, session, inbox, Limits(queue_messages))
    links.wire = wire = ZmqWire(process, sockets, links)
    if network is not None and own is not None:
        wire.join(network, own.address)
    return Bus(process, inbox, links)


def socket_of(sockets: Path, process: str, lane: Lane = CONTROL) -> Path:
    """The file of the ipc socket on which the process receives what is in that lane."""
    return sockets / (process if lane == CONTROL else f"{process}.{lane}")


def endpoint_of(sockets: Path, process: str, lane: Lane) -> str:
    return f"ipc://{socket_of(sockets, process, lane)}"


class ZmqWire:
    """Implements bus.links.Wire."""

    def __init__(self, process: str, sockets: Path, links: Links) -> None:
        self._sockets = sockets
        self._links = links
        self._network: Network | None = None
        self._door: Doorkeeper | None = None
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._dealers: dict[tuple[str, Lane], Socket] = {}
        self._blocked: set[tuple[str, Lane]] = set()
        self._routers: dict[Lane, Socket] = {}
        self._looking: asyncio.TimerHandle | None = None
        links.inbox.when_drained = self._read
        for lane in LANES:
            router = self._routers[lane] = self._socket(zmq.ROUTER, _LINGER_MS)
            router.setsockopt(zmq.MAXMSGSIZE, MAX_PARCEL_BYTES)
            router.bind(endpoint_of(sockets, process, lane))
            self._loop.add_reader(router.fileno(), self._read, lane)
            self._loop.call_soon(self._read, lane)

    # ---------------------------------------------------------------- the rest of the cluster

    def join(self, network: Network, own: Address) -> None:
        """Raises UnusableInput where the process cannot listen at that address; the wire is closed then."""
        door = self._door = Doorkeeper(self._context, network.key, self._refused)
        for lane, router in self._routers.items():
            guard(router, network.key)
            try:
                router.bind(own.of(lane))
            except zmq.ZMQError as error:
                self._close_sockets()
                self._context.term()
                cause = zmq.strerror(error.errno or 0)
                raise UnusableInput(f"{self._links.process} cannot listen at {own.of(lane)}: {cause}") from error
            door.watch(router)
        self._network = network
        network.watchers.append(self._heed_book)
        self._heed_book()
        self._look()

    def _look(self) -> None:
        assert self._network is not None
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        self._network.refresh()

    def _heed_book(self) -> None:
        """Part with those who are gone, and carry on to those whom it has come to know."""
        network = self._network
        assert network is not None
        self._links.first_session = network.first_session
        for process in network.gone:
            self._links.give_up(process)
        unknown = [way for way in self._blocked if way not in self._dealers]
        for process, lane in unknown:
            if network.entry(process) is not None:
                self._blocked.discard((process, lane))
                self._links.carry_on(process, lane)

    def _refused(self) -> None:
        self._links.num_dropped += 1

    def _socket(self, kind: int, linger_ms: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.set_hwm(_QUEUE_PARCELS)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        return socket

    # ---------------------------------------------------------------- what comes in

    def _read(self, lane: Lane) -> None:
        """Take what has arrived. The descriptor reports a change only once, so nothing may be left behind unasked for."""
        router = self._routers[lane]
        if router.closed:
            return
        num_taken = 0
        while num_taken < _READ_AT_ONCE:
            if self._links.inbox.full(lane):
                return  # the inbox calls again when it is half empty
            try:
                parts = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            num_taken += 1 + self._take(lane, parts)
        self._loop.call_soon(self._read, lane)

    def _take(self, lane: Lane, parts: list[bytes]) -> int:
        try:
            route, data = parts
            parcel = decode_parcel(data)
        except ValueError:  # a MalformedParcel is one
            self._links.num_dropped += 1
            return 0
        return self._links.arrived(lane, parcel, partial(self._answer, lane, route))

    def _answer(self, lane: Lane, route: bytes, ack: Ack) -> None:
        router = self._routers[lane]
        router.send_multipart((route, encode_ack(ack)), zmq.NOBLOCK)  # who is gone, or does not read, gets nothing
        if router.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._loop.call_soon(self._read, lane)  # the descriptor may not report what came while this was sent

    # ---------------------------------------------------------------- what goes out

    def carry(self, process: str, lane: Lane, parcel: Parcel) -> bool:
        dealer = self._dealers.get((process, lane)) or self._connect(process, lane)
        if dealer is None:
            self._blocked.add((process, lane))
            return False
        try:
            dealer.send(encode_parcel(parcel), zmq.NOBLOCK)
        except zmq.Again:
            self._blocked.add((process, lane))
            return False
        if dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._loop.call_soon(self._hear, process, lane)
        return True

    def _connect(self, process: str, lane: Lane) -> Socket | None:
        """None as long as the book does not know the process.

        Without an identity: a process that comes back must not be taken for the one that died.
        """
        network = self._network
        entry = None if network is None else network.entry(process)
        if network is not None and entry is None:
            return None
        dealer = self._dealers[process, lane] = self._socket(zmq.DEALER, 0)
        if network is None or entry is None or network.is_near(entry):
            dealer.connect(endpoint_of(self._sockets, process, lane))
        else:
            unlock(dealer, network.key)
            dealer.connect(entry.address.of(lane))
        self._loop.add_reader(dealer.fileno(), self._hear, process, lane)
        return dealer

    def _hear(self, process: str, lane: Lane) -> None:
        """Take the answers, and say where there is room."""
        dealer = self._dealers.get((process, lane))
        while dealer is not None and not dealer.closed:
            try:
                ack = decode_ack(dealer.recv(zmq.NOBLOCK))
            except MalformedParcel:
                self._links.num_dropped += 1
                continue
            except zmq.Again:
                break
            self._links.hear(process, lane, ack)
        if dealer is None or dealer.closed or (process, lane) not in self._blocked:
            return
        if dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT:  # pyright: ignore[reportOperatorIssue]
            self._blocked.discard((process, lane))
            self._links.carry_on(process, lane)

    def part(self, process: str) -> None:
        for lane in LANES:
            dealer = self._dealers.pop((process, lane), None)
            self._blocked.discard((process, lane))
            if dealer is not None:
                self._loop.remove_reader(dealer.fileno())
                dealer.close()

    # ---------------------------------------------------------------- ending

    async def close(self) -> None:
        """Waits up to half a second for answers that are not yet written."""
        self._close_sockets()
        await self._loop.run_in_executor(None, self._context.term)

    def _close_sockets(self) -> None:
        if self._network is not None:
            self._network.watchers.remove(self._heed_book)
        if self._looking is not None:
            self._looking.cancel()
        for process, _ in list(self._dealers):
            self.part(process)
        for router in self._routers.values():
            self._loop.remove_reader(router.fileno())
        if self._door is not None:
            self._door.close()
        for router in self._routers.values():
            router.close()
