"""Tests of invalid input to the sockets of a process, and of broken connections."""

import asyncio
import errno
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from asterism.bus.codec import encode
from asterism.bus.lanes import BULK, CONTROL, LANES, Lane
from asterism.bus.messages import Envelope
from asterism.bus.transport import packets
from asterism.bus.transport.packets import Packet, encode_packet
from asterism.bus.transport.reliable_transport import ReliableTransport
from asterism.bus.transport.zeromq import format_ipc_endpoint, get_socket_path, open_zmq_bus
from tests.bus.networks import Join, call, network, send_calls, until_acknowledged, wait_until

pytestmark = [pytest.mark.usefixtures("short_waits"), pytest.mark.real_clock, pytest.mark.timeout(60)]

EPOCH = 3


@pytest.fixture
def join(tmp_path: Path) -> AbstractAsyncContextManager[Join]:
    return network("zeromq", tmp_path)


@contextmanager
def raw_socket(folder: Path, lane: Lane, *, receives: bool = False) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket that sends packets to process b, or receives the packets for process b."""
    with zmq.Context() as context, context.socket(zmq.ROUTER if receives else zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        (socket.bind if receives else socket.connect)(format_ipc_endpoint(folder, "b", lane))
        yield socket


def make_packet(
    first: int, count: int, sender: str = "a", receiver: int = EPOCH, epoch: int = 1, to: str = "b"
) -> bytes:
    frames = [encode(Envelope("a", "b", call(number))) for number in range(first, first + count)]
    return encode_packet(Packet(sender, to, epoch, receiver, 0, 0, first, frames))


VALID = make_packet(0, 2)
MALFORMED = [
    *(b"", b"\xc1", VALID[:-1], VALID + b"\x00", b"\x91" * 100_000, make_packet(0, 2, sender="")),
    *(make_packet(0, 2, sender="a" * 256), make_packet(0, 2, to=""), make_packet(-1, 1), make_packet(1 << 62, 0)),
    make_packet(0, 1, epoch=-1),
    msgspec.msgpack.encode(["a", "b", 1, EPOCH, 0, 0, 0, [b"x", "y"]]),
    msgspec.msgpack.encode(["a", "b", 1, EPOCH, 0, 0, 0, [b"x"], "more"]),
    msgspec.msgpack.encode(["a", "b", 1, EPOCH, 0, 0, 1 << 63, []]),
    msgspec.msgpack.encode({"sender": "a"}),
    VALID[:-1].replace(b"\x92", b"\xdd\xff\xff\xff\xff"),  # wrong number of frames
    b"\x98\xa1\xff" + VALID[3:],  # invalid UTF-8
]


@pytest.mark.parametrize("lane", LANES)
async def test_malformed_packets_are_counted_and_dropped(join: Join, tmp_path: Path, lane: Lane) -> None:
    bus, other = join("b", EPOCH), join("c")
    with raw_socket(tmp_path, lane) as socket:
        for data in MALFORMED:
            socket.send(data)
        socket.send_multipart([VALID, VALID])
        await wait_until(lambda: bus.dropped == len(MALFORMED) + 1)
        assert bus.waiting == 0
        await other.send("b", call(7))
        assert (await bus.receive()).message == call(7)


async def test_duplicate_and_stale_packets_are_counted_and_dropped(join: Join, tmp_path: Path) -> None:
    bus = join("b", EPOCH)
    with raw_socket(tmp_path, BULK) as socket:
        for data in (make_packet(0, 5), make_packet(5, 5), make_packet(0, 5), make_packet(2, 6), make_packet(5, 6)):
            socket.send(data)
        await wait_until(lambda: bus.dropped == 5 + 6 + 5)
        socket.send(make_packet(0, 3, epoch=0))  # old epoch of the sender
        socket.send(make_packet(11, 1, receiver=EPOCH - 1))  # old epoch of the receiver
        socket.send(make_packet(11, 1, to="c"))  # packet for another receiver
        socket.send(make_packet(11, 1))
        received = [(await bus.receive()).message for _ in range(12)]
        assert received == [call(number) for number in range(12)]
        assert bus.dropped == 18


async def test_an_oversized_packet_is_dropped(join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "MAX_PACKET_BYTES", len(VALID) - 1)
    bus = join("b", EPOCH)
    with raw_socket(tmp_path, BULK) as socket:
        socket.send(VALID)
        socket.send(make_packet(0, 1))
        await wait_until(lambda: bus.waiting == 1)
        assert bus.dropped == 1


@pytest.mark.slow
async def test_malformed_acknowledgements_are_counted_and_dropped(join: Join, tmp_path: Path) -> None:
    """The peer sends random bytes as acknowledgements."""
    draw = random.Random(5)
    answers = [b"", b"\xc1", msgspec.msgpack.encode([1, 2, 3]), *(draw.randbytes(12) for _ in range(50))]
    bus = join("a")
    with raw_socket(tmp_path, BULK, receives=True) as router:
        await bus.send("b", call(0))
        await asyncio.sleep(0.1)
        route, question = router.recv_multipart()
        assert packets.decode_packet(question).frames == []
        for answer in answers:
            router.send_multipart([route, answer])
        await wait_until(lambda: bus.dropped == len(answers))
        assert bus.unacknowledged == {"b": 1}


@pytest.mark.slow
async def test_a_broken_connection_neither_loses_nor_duplicates_frames(tmp_path: Path) -> None:
    """A relay between a and b repeatedly closes the connection and drops the bytes in transit."""
    near, far = tmp_path / "near", tmp_path / "far"
    for folder in (near, far):
        folder.mkdir()
    a, b = open_zmq_bus("a", near, 200), open_zmq_bus("b", far, 200)
    relaying = asyncio.create_task(relay(near / "b.bulk", far / "b.bulk"))
    sending = asyncio.create_task(send_calls(a, "b", 1500, code="#" * 100))
    received = [(await b.receive()).message for _ in range(1500)]
    assert received == [call(number, "#" * 100) for number in range(1500)]
    await sending
    await until_acknowledged(a)
    assert b.waiting == 0
    relaying.cancel()
    await asyncio.gather(relaying, return_exceptions=True)
    await a.close()
    await b.close()


CUT_AFTER_BYTES = 100_000


async def relay(here: Path, there: Path) -> None:
    """Forward CUT_AFTER_BYTES of each connection, then close it."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_unix_connection(str(there))
        back = asyncio.create_task(copy(other_reader, writer, None))
        await copy(reader, other_writer, CUT_AFTER_BYTES)
        back.cancel()
        other_writer.close()
        writer.close()

    async with await asyncio.start_unix_server(connected, str(here)) as server:
        await server.serve_forever()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int | None) -> None:
    copied = 0
    while (most is None or copied < most) and (data := await reader.read(4096)):
        writer.write(data)
        await writer.drain()
        copied += len(data)


async def test_a_full_socket_refuses_packets_until_it_is_writable(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ queues a bounded number of packets for a peer that does not listen yet."""
    writable: list[tuple[str, Lane]] = []
    monkeypatch.setattr(ReliableTransport, "on_writable", lambda links, process, lane: writable.append((process, lane)))
    wire = join("a", EPOCH)._transport.wire  # pyright: ignore
    sent = 0
    while wire.send("b", BULK, Packet("a", "b", EPOCH, 0, 0, 0, sent, [b"x"])):
        sent += 1
    assert 0 < sent < 1000
    assert not wire.send("b", BULK, Packet("a", "b", EPOCH, 0, 0, 0, sent, [b"x"]))
    assert wire.send("b", CONTROL, Packet("a", "b", EPOCH, 0, 0, 0, 0, [b"x"]))
    with raw_socket(tmp_path, BULK, receives=True) as router:
        poller = zmq.asyncio.Poller()
        poller.register(router, zmq.POLLIN)
        numbers: list[int] = []
        while len(numbers) < sent:
            await poller.poll()
            numbers.append(packets.decode_packet(router.recv_multipart()[1]).first)
        await wait_until(lambda: bool(writable))
    assert numbers == list(range(sent))
    assert writable == [("b", BULK)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_connections_of_other_users_are_closed() -> None:
    async def read_greeting(user: int) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            os.seteuid(user)
            try:
                connection.connect(str(get_socket_path(folder, "b")))
            finally:
                os.seteuid(0)
            connection.setblocking(False)
            return await asyncio.get_running_loop().sock_recv(connection, 10)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o777)  # noqa: PTH101
        bus = open_zmq_bus("b", folder, 100)
        os.chmod(get_socket_path(folder, "b"), 0o666)  # noqa: PTH101
        assert await read_greeting(0)
        assert not await read_greeting(1000)
        await bus.close()


@pytest.mark.slow
async def test_frames_for_a_peer_wait_for_a_free_file_descriptor(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    create, failures = zmq.Context.socket, [errno.EMFILE, errno.EMFILE]
    a, b = join("a"), join("b")

    def fail_first(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        if failures:
            raise zmq.ZMQError(failures.pop())
        return create(context, kind)

    monkeypatch.setattr(zmq.Context, "socket", fail_first)
    with capture_logs() as logs:
        await a.send("b", call(1))
        assert (await b.receive()).message == call(1)
    assert [log["event"] for log in logs] == ["peer.not_connected"] * 2
