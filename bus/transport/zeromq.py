"""Transport over ZeroMQ. Per lane, a process binds one ROUTER and connects a DEALER to each process it sends to.

Packets travel from DEALER to ROUTER, acknowledgements back. asterism.bus.transport.reliable_transport holds
unacknowledged frames, so that a broken connection loses no frame, and ZeroMQ's queues are short.

The event loop drains the sockets on their file descriptors, many frames per wake-up; pyzmq's
asyncio sockets need one future per frame and reach a quarter of the rate.
"""

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
import zmq

from asterism.bus.bus import Bus, BusFactory, Inbox
from asterism.bus.lanes import CONTROL, LANES, Lane
from asterism.bus.transport.address_book import Network, TcpAddress, load_network
from asterism.bus.transport.curve_auth import ZapAuthenticator, secure_client_socket, secure_server_socket
from asterism.bus.transport.packets import (
    MAX_PACKET_BYTES,
    Ack,
    MalformedPacket,
    Packet,
    decode_ack,
    decode_packet,
    encode_ack,
    encode_packet,
)
from asterism.bus.transport.reliable_transport import LinkLimits, ReliableTransport
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

_LINGER_MS = 500  # time that closing waits for unwritten acknowledgements
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 500
_HIGH_WATER_MARK = 64  # length of ZeroMQ's queues in packets, at either end of a connection
_MAX_READS_PER_WAKEUP = 1024  # bound, so that the event loop can run other callbacks
_MAX_SOCKETS = 65_536
_BOOK_POLL_S = 0.25

Socket = zmq.Socket[bytes]


def open_zmq_bus(
    process: str,
    sockets: Path,
    queue_messages: int,
    epoch: int = 0,
    network: Network | None = None,
    *,
    accepts_peer: Callable[[str], bool] | None = None,
    max_packet_bytes: int = MAX_PACKET_BYTES,
) -> Bus:
    """Open a bus between the processes of one machine, with ipc sockets in the folder `sockets`.

    With a network, the bus connects the processes in the address book, on any node, and listens on the process's
    address in the book. Frames for a process that is not in the book yet wait. `accepts_peer` decides on the links of
    unknown processes. Needs a running event loop. Raises UnusableInput if the process cannot listen.
    """
    own = None if network is None else network.find_entry(process)
    if network is not None and own is None:
        raise UnusableInput(f"{process} has no address in the address book in {sockets}, so that it cannot listen")
    inbox = Inbox(queue_messages)
    transport = ReliableTransport(process, epoch, inbox, LinkLimits(queue_messages))
    transport.accepts_peer = accepts_peer or transport.accepts_peer
    transport.wire = wire = ZmqWire(process, sockets, transport, max_packet_bytes)
    if network is not None and own is not None:
        wire.join(network, own.address)
    return Bus(process, inbox, transport)


def make_zeromq_bus_factory(run: RunConfig, folder: RunFolder) -> BusFactory:
    """Return a factory of buses for a run's processes, across nodes if the run has an address book."""
    return lambda process, epoch: open_zmq_bus(
        process, folder.sockets, run.bus.queue_messages, epoch, load_network(folder.sockets)
    )


def get_socket_path(sockets: Path, process: str, lane: Lane = CONTROL) -> Path:
    """Return the file of the ipc socket on which the process receives the frames of a lane."""
    return sockets / (process if lane == CONTROL else f"{process}.{lane}")


def format_ipc_endpoint(sockets: Path, process: str, lane: Lane) -> str:
    return f"ipc://{get_socket_path(sockets, process, lane)}"


class ZmqWire:
    """Implements asterism.bus.transport.reliable_transport.Wire."""

    def __init__(
        self, process: str, sockets: Path, transport: ReliableTransport, max_packet_bytes: int = MAX_PACKET_BYTES
    ) -> None:
        self._sockets = sockets
        self._transport = transport
        self._network: Network | None = None
        self._authenticator: ZapAuthenticator | None = None
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._dealers: dict[tuple[str, Lane], Socket] = {}
        self._blocked: set[tuple[str, Lane]] = set()
        self._routers: dict[Lane, Socket] = {}
        self._poll_timer: asyncio.TimerHandle | None = None
        transport.inbox.on_drained = self._read
        for lane in LANES:
            router = self._routers[lane] = self._create_socket(zmq.ROUTER, _LINGER_MS)
            router.setsockopt(zmq.MAXMSGSIZE, max_packet_bytes)
            router.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            router.bind(format_ipc_endpoint(sockets, process, lane))
            self._loop.add_reader(router.fileno(), self._read, lane)
            self._loop.call_soon(self._read, lane)

    # ---------------------------------------------------------------- other nodes

    def join(self, network: Network, address: TcpAddress) -> None:
        """Listen on the address. Raises UnusableInput and closes the wire if the process cannot listen there."""
        authenticator = self._authenticator = ZapAuthenticator(self._context, network.key, self._count_refused)
        for lane, router in self._routers.items():
            secure_server_socket(router, network.key)
            try:
                router.bind(address.format_endpoint(lane))
            except zmq.ZMQError as error:
                self._close_sockets()
                self._context.term()
                cause = zmq.strerror(error.errno or 0)
                raise UnusableInput(
                    f"{self._transport.process} cannot listen on {address.format_endpoint(lane)}: {cause}"
                ) from error
            authenticator.monitor_handshakes(router)
        self._network = network
        network.change_callbacks.append(self._on_book_changed)
        self._on_book_changed()
        self._poll_address_book()

    def _poll_address_book(self) -> None:
        assert self._network is not None
        self._poll_timer = self._loop.call_later(_BOOK_POLL_S, self._poll_address_book)
        self._network.refresh()

    def _on_book_changed(self) -> None:
        """Drop departed processes, and send waiting frames to new processes of the book."""
        network = self._network
        assert network is not None
        self._transport.first_epoch = network.first_epoch
        for process in network.departed:
            self._transport.drop_peer(process)
        unconnected = [key for key in self._blocked if key not in self._dealers]
        for process, lane in unconnected:
            if network.find_entry(process) is not None:
                self._blocked.discard((process, lane))
                self._transport.on_writable(process, lane)

    def _count_refused(self) -> None:
        self._transport.num_dropped += 1

    def _create_socket(self, kind: int, linger_ms: int) -> Socket:
        socket: Socket = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, linger_ms)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        return socket

    # ---------------------------------------------------------------- receiving

    def _read(self, lane: Lane) -> None:
        """Read packets until none is left or the inbox is full, because the descriptor reports only changes."""
        router = self._routers[lane]
        if router.closed:
            return
        num_read = 0
        while num_read < _MAX_READS_PER_WAKEUP:
            if self._transport.inbox.is_full(lane):
                return  # a half-empty inbox calls `_read` again
            try:
                parts = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            num_read += 1 + self._deliver(lane, parts)
        self._loop.call_soon(self._read, lane)

    def _deliver(self, lane: Lane, parts: list[bytes]) -> int:
        try:
            route, data = parts
            packet = decode_packet(data)
        except ValueError:  # includes MalformedPacket
            self._transport.num_dropped += 1
            return 0
        return self._transport.on_packet(lane, packet, partial(self._send_ack, lane, route))

    def _send_ack(self, lane: Lane, route: bytes, ack: Ack) -> None:
        router = self._routers[lane]
        router.send_multipart((route, encode_ack(ack)), zmq.NOBLOCK)  # dropped if the peer has left or does not read
        if router.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._loop.call_soon(self._read, lane)  # sending can clear the descriptor's event

    # ---------------------------------------------------------------- sending

    def send(self, process: str, lane: Lane, packet: Packet) -> bool:
        dealer = self._dealers.get((process, lane)) or self._connect(process, lane)
        if dealer is None:
            self._blocked.add((process, lane))
            return False
        try:
            dealer.send(encode_packet(packet), zmq.NOBLOCK)
        except zmq.Again:
            self._blocked.add((process, lane))
            return False
        if dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._loop.call_soon(self._read_acks, process, lane)
        return True

    def _connect(self, process: str, lane: Lane) -> Socket | None:
        """Connect to the process; None if the book lacks the process, or if no descriptor is free.

        The socket has no identity: ZeroMQ must not take a restarted process for its previous
        incarnation.
        """
        network = self._network
        entry = None if network is None else network.find_entry(process)
        if network is not None and entry is None:
            return None
        try:
            dealer = self._create_socket(zmq.DEALER, 0)
        except zmq.ZMQError as error:  # the next probe tries again
            structlog.get_logger().error("peer.not_connected", peer=process, cause=zmq.strerror(error.errno or 0))
            return None
        self._dealers[process, lane] = dealer
        if network is None or entry is None or network.is_local(entry):
            dealer.connect(format_ipc_endpoint(self._sockets, process, lane))
        else:
            secure_client_socket(dealer, network.key)
            dealer.connect(entry.address.format_endpoint(lane))
        self._loop.add_reader(dealer.fileno(), self._read_acks, process, lane)
        return dealer

    def _read_acks(self, process: str, lane: Lane) -> None:
        """Read acknowledgements, and report when the socket is writable again."""
        dealer = self._dealers.get((process, lane))
        while dealer is not None and not dealer.closed:
            try:
                ack = decode_ack(dealer.recv(zmq.NOBLOCK))
            except MalformedPacket:
                self._transport.num_dropped += 1
                continue
            except zmq.Again:
                break
            self._transport.on_ack(process, lane, ack)
        if dealer is None or dealer.closed or (process, lane) not in self._blocked:
            return
        if dealer.getsockopt(zmq.EVENTS) & zmq.POLLOUT:  # pyright: ignore[reportOperatorIssue]
            self._blocked.discard((process, lane))
            self._transport.on_writable(process, lane)

    def disconnect(self, process: str) -> None:
        for lane in LANES:
            dealer = self._dealers.pop((process, lane), None)
            self._blocked.discard((process, lane))
            if dealer is not None:
                self._loop.remove_reader(dealer.fileno())
                dealer.close()

    # ---------------------------------------------------------------- closing

    async def close(self) -> None:
        """Close the sockets; wait up to half a second for unwritten acknowledgements."""
        self._close_sockets()
        await self._loop.run_in_executor(None, self._context.term)

    def _close_sockets(self) -> None:
        if self._network is not None:
            self._network.change_callbacks.remove(self._on_book_changed)
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        for process, _ in list(self._dealers):
            self.disconnect(process)
        for router in self._routers.values():
            self._loop.remove_reader(router.fileno())
        if self._authenticator is not None:
            self._authenticator.close()
        for router in self._routers.values():
            router.close()
