"""One contract for both transports: each frame once, in order, bounded, to the right address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.codec import MalformedFrame, decode, encode
from bus.in_process import Hub
from bus.messages import Envelope, LeaseReleased, LeaseRequested, Shutdown, TurnGenerated
from bus.transport import Bus
from bus.zeromq import zmq_bus

Join = Callable[[str], Bus]


@asynccontextmanager
async def network(kind: str, folder: Path, bound: int = 1000) -> AsyncIterator[Join]:
    hub, joined = Hub(), list[Bus]()

    def join(process: str) -> Bus:
        bus = hub.join(process, bound) if kind == "in_process" else zmq_bus(process, folder, bound)
        joined.append(bus)
        return bus

    yield join
    for bus in joined:
        await bus.close()


@pytest.fixture(params=["in_process", "zeromq"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_messages_arrive_once_and_in_order(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            for number in range(500):
                await a.send("b/actor", LeaseRequested(number, 1))
            received = [await b.receive() for _ in range(500)]
            assert [one.message for one in received] == [LeaseRequested(number, 1) for number in range(500)]
            assert {(one.sender, one.to) for one in received} == {("a", "b/actor")}
            assert b.waiting == 0

    asyncio.run(scenario())


def test_a_message_to_somebody_who_joins_later_waits_for_him(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            sending = asyncio.create_task(join("a").send("b", LeaseReleased(7)))
            await asyncio.sleep(0)
            assert (await join("b").receive()).message == LeaseReleased(7)
            await sending

    asyncio.run(scenario())


def test_messages_to_the_own_process_do_not_leave_it(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a = join("a")
            await a.send("a/other", Shutdown())
            assert a.waiting == 1
            assert (await a.receive()).to == "a/other"

    asyncio.run(scenario())


def test_a_full_queue_makes_the_sender_wait_and_drops_nothing(kind: str, tmp_path: Path) -> None:
    total, frame = 5000, bytes(4096)

    async def scenario() -> None:
        async with network(kind, tmp_path, bound=16) as join:
            a, b = join("a"), join("b")

            async def send_all() -> None:
                for number in range(total):
                    await a.send("b", TurnGenerated(number, 0, frame, b"", b"", "stop"))

            sending = asyncio.create_task(send_all())
            await b.receive()
            for _ in range(50):  # give the sender every chance to run ahead
                await asyncio.sleep(0)
            assert not sending.done()
            assert b.waiting <= 16
            numbers = [(await b.receive()).message.trajectory_id for _ in range(total - 1)]  # pyright: ignore
            assert numbers == list(range(1, total))
            await sending

    asyncio.run(scenario())


def test_many_senders_that_wait_for_one_receiver_all_get_their_turn(kind: str, tmp_path: Path) -> None:
    senders, each, frame = 8, 200, bytes(65_536)

    async def scenario() -> None:
        async with network(kind, tmp_path, bound=4) as join:
            a, b = join("a"), join("b")

            async def send(sender: int) -> None:
                for number in range(each):
                    await a.send("b", TurnGenerated(sender * each + number, 0, frame, b"", b"", "stop"))

            sending = [asyncio.create_task(send(sender)) for sender in range(senders)]
            received = [(await b.receive()).message.trajectory_id for _ in range(senders * each)]  # pyright: ignore
            assert sorted(received) == list(range(senders * each))
            await asyncio.gather(*sending)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_a_frame_that_is_no_envelope_is_refused_and_the_next_one_is_read(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            await a.send_frame("b", b"\xc1 nonsense")
            await a.send("b", LeaseReleased(1))
            with pytest.raises(MalformedFrame):
                await b.receive()
            assert (await b.receive()).message == LeaseReleased(1)

    asyncio.run(scenario())


def test_an_address_is_taken_by_one_process_alone() -> None:
    async def scenario() -> None:
        hub = Hub()
        hub.join("a", 10)
        with pytest.raises(ValueError, match="taken"):
            hub.join("a", 10)

    asyncio.run(scenario())


@pytest.mark.parametrize("frame", [b"", b"\x93\xa1a\xa1b\x91\xa7Unknown", encode(Envelope("a", "b", Shutdown()))[:-1]])
def test_the_codec_refuses_what_is_not_of_this_protocol(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode(frame)


def test_the_codec_keeps_bytes_and_text() -> None:
    envelope = Envelope("a", "b", TurnGenerated(1, 0, b"\x00\xff", b"", b"", "stop"))
    assert decode(encode(envelope)) == envelope
