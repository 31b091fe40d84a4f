"""What strangers put on a process's sockets is counted and dropped, and harms nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from bus import parcels
from bus.codec import encode
from bus.lanes import BULK, CONTROL, LANES, Lane
from bus.links import Links
from bus.messages import Envelope
from bus.parcels import Parcel, encode_parcel
from bus.transport import Bus
from bus.zeromq import endpoint_of, zmq_bus
from tests.bus.networks import call, until

pytestmark = pytest.mark.usefixtures("short_waits")

SESSION = 3


@contextmanager
def stranger(folder: Path, lane: Lane) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint_of(folder, "b", lane))
        yield socket


def parcel(
    first: int, count: int, sender: str = "a", receiver: int = SESSION, session: int = 1, to: str = "b"
) -> bytes:
    frames = [encode(Envelope("a", "b", call(number))) for number in range(first, first + count)]
    return encode_parcel(Parcel(sender, to, session, receiver, 0, 0, first, frames))


GOOD = parcel(0, 2)
BROKEN = [
    b"",
    b"\xc1",
    GOOD[:-1],
    GOOD + b"\x00",
    b"\x91" * 100_000,
    parcel(0, 2, sender=""),
    parcel(0, 2, sender="a" * 256),
    parcel(0, 2, to=""),
    parcel(-1, 1),
    parcel(1 << 62, 0),
    parcel(0, 1, session=-1),
    msgspec.msgpack.encode(["a", "b", 1, SESSION, 0, 0, 0, [b"x", "y"]]),
    msgspec.msgpack.encode(["a", "b", 1, SESSION, 0, 0, 0, [b"x"], "more"]),
    msgspec.msgpack.encode(["a", "b", 1, SESSION, 0, 0, 1 << 63, []]),
    msgspec.msgpack.encode({"sender": "a"}),
    GOOD[:-1].replace(b"\x92", b"\xdd\xff\xff\xff\xff"),  # so many frames are not there
    b"\x98\xa1\xff" + GOOD[3:],  # a name that is no text
]


@pytest.mark.parametrize("lane", LANES)
def test_broken_parcels_are_counted_and_dropped(tmp_path: Path, lane: Lane) -> None:
    async def scenario() -> None:
        bus, other = zmq_bus("b", tmp_path, 100, SESSION), zmq_bus("c", tmp_path, 100)
        with stranger(tmp_path, lane) as socket:
            for data in BROKEN:
                socket.send(data)
            socket.send_multipart([GOOD, GOOD])
            await until(lambda: bus.dropped == len(BROKEN) + 1)
            assert bus.waiting == 0
            await other.send("b", call(7))
            assert (await bus.receive()).message == call(7)
        await other.close()
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


def test_parcels_that_are_played_again_are_counted_and_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        bus = zmq_bus("b", tmp_path, 1000, SESSION)
        with stranger(tmp_path, BULK) as socket:
            for data in (parcel(0, 5), parcel(5, 5), parcel(0, 5), parcel(2, 6), parcel(5, 6)):
                socket.send(data)
            await until(lambda: bus.dropped == 5 + 6 + 5)
            socket.send(parcel(0, 3, session=0))  # of a life that is over
            socket.send(parcel(11, 1, receiver=SESSION - 1))  # meant for a life that is over
            socket.send(parcel(11, 1, to="c"))  # who listened there before
            socket.send(parcel(11, 1))
            received = [(await bus.receive()).message for _ in range(12)]
            assert received == [call(number) for number in range(12)]
            assert bus.dropped == 18
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


def test_a_parcel_longer_than_parcels_may_be_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "MAX_PARCEL_BYTES", len(GOOD) - 1)

    async def scenario() -> None:
        bus = zmq_bus("b", tmp_path, 1000, SESSION)
        with stranger(tmp_path, BULK) as socket:
            socket.send(GOOD)
            socket.send(parcel(0, 1))
            await until(lambda: bus.waiting == 1)
            assert bus.dropped == 1
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


@pytest.mark.slow
def test_answers_that_nobody_asked_for_harm_nobody(tmp_path: Path) -> None:
    """A peer that answers with anything at all."""

    async def scenario() -> None:
        draw = random.Random(5)
        answers = [b"", b"\xc1", msgspec.msgpack.encode([1, 2, 3]), *(draw.randbytes(12) for _ in range(50))]
        bus = zmq_bus("a", tmp_path, 1000)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(endpoint_of(tmp_path, "b", BULK))
            await bus.send("b", call(0))
            await asyncio.sleep(0.1)
            route, question = router.recv_multipart()
            assert parcels.decode_parcel(question).frames == []
            for answer in answers:
                router.send_multipart([route, answer])
            await until(lambda: bus.dropped == len(answers))
            assert bus.unacknowledged == {"b": 1}
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))


@pytest.mark.slow
def test_a_broken_connection_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """What goes from a to b passes through somebody who cuts the connection again and again, with what is in it."""

    async def scenario() -> None:
        near, far = tmp_path / "near", tmp_path / "far"
        for folder in (near, far):
            folder.mkdir()
        a, b = zmq_bus("a", near, 200), zmq_bus("b", far, 200)
        relaying = asyncio.create_task(relay(near / "b.bulk", far / "b.bulk"))
        sending = asyncio.create_task(send_calls(a, 1500))
        received = [(await b.receive()).message for _ in range(1500)]
        assert received == [call(number, "#" * 100) for number in range(1500)]
        await sending
        await until(lambda: not a.unacknowledged)
        assert b.waiting == 0
        relaying.cancel()
        await asyncio.gather(relaying, return_exceptions=True)
        await a.close()
        await b.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


async def send_calls(bus: Bus, count: int) -> None:
    for number in range(count):
        await bus.send("b", call(number, "#" * 100))


CUT_AFTER_BYTES = 100_000


async def relay(here: Path, there: Path) -> None:
    """Of each connection so many bytes get through."""

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


def test_what_finds_no_room_is_told_so_and_goes_on_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ takes a bounded number of parcels for a peer that is not there yet."""

    async def scenario() -> None:
        room: list[tuple[str, Lane]] = []
        monkeypatch.setattr(Links, "carry_on", lambda links, process, lane: room.append((process, lane)))
        bus = zmq_bus("a", tmp_path, 100, SESSION)
        wire = bus._transport.wire  # pyright: ignore
        sent = 0
        while wire.carry("b", BULK, Parcel("a", "b", SESSION, 0, 0, 0, sent, [b"x"])):
            sent += 1
        assert 0 < sent < 1000
        assert not wire.carry("b", BULK, Parcel("a", "b", SESSION, 0, 0, 0, sent, [b"x"]))
        assert wire.carry("b", CONTROL, Parcel("a", "b", SESSION, 0, 0, 0, 0, [b"x"]))
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(endpoint_of(tmp_path, "b", BULK))
            poller = zmq.asyncio.Poller()
            poller.register(router, zmq.POLLIN)
            numbers: list[int] = []
            while len(numbers) < sent:
                await poller.poll()
                numbers.append(parcels.decode_parcel(router.recv_multipart()[1]).first)
            await until(lambda: bool(room))
        assert numbers == list(range(sent))
        assert room == [("b", BULK)]
        await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), timeout=30))
