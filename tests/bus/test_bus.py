"""One contract for both transports, in batches or not: each frame once, in order, bounded, to the right address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.batching import BatchingTransport, batched
from bus.codec import MalformedFrame, begins_with, decode, encode, encode_batch, head_of, split
from bus.in_process import Hub
from bus.messages import (
    AnyMessage,
    CodeRequested,
    Envelope,
    LeaseReleased,
    LeaseRequested,
    SessionEnded,
    Shutdown,
    TurnGenerated,
)
from bus.transport import Bus
from bus.zeromq import zmq_bus
from tests.simulation.clock import run_virtually

Join = Callable[[str], Bus]


def call(number: int, code: str = "1") -> CodeRequested:
    return CodeRequested(number, 0, "jupyter_code", code, "")


def lease_request(number: int) -> LeaseRequested:
    return LeaseRequested(number, 0, turn=0, lease=1, tokens=5, prompt_tokens=5, max_new_tokens=9)


@asynccontextmanager
async def network(kind: str, folder: Path, bound: int = 1000) -> AsyncIterator[Join]:
    hub, joined = Hub(), list[Bus]()

    def join(process: str) -> Bus:
        bus = zmq_bus(process, folder, bound) if "zeromq" in kind else hub.join(process, bound)
        joined.append(batched(bus) if "batched" in kind else bus)
        return joined[-1]

    yield join
    for bus in joined:
        await bus.close()


@pytest.fixture(params=["in_process", "zeromq", "batched in_process", "batched zeromq"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_messages_arrive_once_and_in_order(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            for number in range(500):
                await a.send("b/actor", lease_request(number))
            received = [await b.receive() for _ in range(500)]
            assert [one.message for one in received] == [lease_request(number) for number in range(500)]
            assert {(one.sender, one.to) for one in received} == {("a", "b/actor")}
            assert b.waiting == 0

    asyncio.run(scenario())


def test_a_message_to_somebody_who_joins_later_waits_for_him(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            sending = asyncio.create_task(join("a").send("b", LeaseReleased(7, 5)))
            await asyncio.sleep(0)
            assert (await join("b").receive()).message == LeaseReleased(7, 5)
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
    total, frame = 400, bytes(65_536)

    async def scenario() -> None:
        async with network(kind, tmp_path, bound=16) as join:
            a, b = join("a"), join("b")

            async def send_all() -> None:
                for number in range(total):
                    await a.send("b", TurnGenerated(number, 0, 1, frame, b"", b"", "stop"))

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
    senders, each, frame = 8, 40, bytes(65_536)

    async def scenario() -> None:
        async with network(kind, tmp_path, bound=4) as join:
            a, b = join("a"), join("b")

            async def send(sender: int) -> None:
                for number in range(each):
                    await a.send("b", TurnGenerated(sender * each + number, 0, 1, frame, b"", b"", "stop"))

            sending = [asyncio.create_task(send(sender)) for sender in range(senders)]
            received = [(await b.receive()).message.trajectory_id for _ in range(senders * each)]  # pyright: ignore
            assert sorted(received) == list(range(senders * each))
            await asyncio.gather(*sending)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


@pytest.mark.parametrize("bound", [4, 1000])
def test_messages_of_all_kinds_keep_their_order(kind: str, tmp_path: Path, bound: int) -> None:
    """Those that may travel in a batch, and those that travel alone between them."""
    stretches = (1, 200, 2, 63, 1, 64, 3, 65, 1, 1, 7)
    messages: list[AnyMessage] = []
    for place, length in enumerate(stretches):
        for _ in range(length):
            number = len(messages)
            messages.append(call(number) if place % 2 else LeaseReleased(number, 5))

    async def scenario() -> None:
        async with network(kind, tmp_path, bound) as join:
            a, b = join("a"), join("b")

            async def send_all() -> None:
                for message in messages:
                    await a.send("b", message)

            sending = asyncio.create_task(send_all())
            assert [(await b.receive()).message for _ in messages] == messages
            await sending
            assert b.waiting == 0

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_what_was_sent_before_closing_arrives(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            for number in range(150):
                await a.send("b", call(number))
            await a.close()
            assert [(await b.receive()).message for _ in range(150)] == [call(number) for number in range(150)]

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_a_sender_that_is_cancelled_takes_no_other_message_along(kind: str, tmp_path: Path) -> None:

    async def scenario() -> None:
        async with network(kind, tmp_path, bound=8) as join:
            a, b = join("a"), join("b")
            senders = [asyncio.create_task(a.send("b", call(number, "#" * 4096))) for number in range(800)]
            for _ in range(20):
                await asyncio.sleep(0)
            for sender in senders[1::2]:
                sender.cancel()
            numbers: list[int] = []

            async def receive_all() -> None:
                while isinstance(message := (await b.receive()).message, CodeRequested):
                    numbers.append(message.trajectory_id)

            receiving = asyncio.create_task(receive_all())
            await asyncio.gather(*senders, return_exceptions=True)
            await a.send("b", LeaseReleased(9, 5))
            await receiving
            sent = {number for number, sender in enumerate(senders) if not sender.cancelled()}
            assert len(sent) < 800
            assert sorted(numbers) == sorted(sent)

    asyncio.run(asyncio.wait_for(scenario(), timeout=60))


def test_a_frame_that_is_no_envelope_is_refused_and_the_next_one_is_read(kind: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with network(kind, tmp_path) as join:
            a, b = join("a"), join("b")
            await a.send_frame("b", b"\xc1 nonsense")
            await a.send("b", LeaseReleased(1, 5))
            with pytest.raises(MalformedFrame):
                await b.receive()
            assert (await b.receive()).message == LeaseReleased(1, 5)

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
    envelope = Envelope("a", "b", TurnGenerated(1, 0, 1, b"\x00\xff", b"", b"", "stop"))
    assert decode(encode(envelope)) == envelope


# ---------------------------------------------------------------- batches


class Recorder:
    """A transport that keeps what it is given; full until `open` is set."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()

    async def send_frame(self, process: str, frame: bytes) -> None:
        await self.open.wait()
        self.frames.append(frame)

    async def close(self) -> None:
        pass


def sizes(frames: list[bytes]) -> list[int]:
    return [len(split(frame)) for frame in frames]


async def rounds(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def frame_of(message: AnyMessage) -> bytes:
    return encode(Envelope("a", "b", message))


def test_what_is_sent_in_one_turn_of_the_loop_travels_together_and_nothing_waits_for_more() -> None:
    async def scenario() -> None:
        beneath = Recorder()
        transport = BatchingTransport(beneath)
        for number in range(5):
            await transport.send_frame("b", frame_of(call(number)))
        await rounds(2)
        await transport.send_frame("b", frame_of(SessionEnded(1)))
        await rounds(2)
        assert sizes(beneath.frames) == [5, 1]
        assert beneath.frames[1] == frame_of(SessionEnded(1))
        await transport.close()

    asyncio.run(scenario())


def test_a_batch_has_64_messages_at_most_and_its_neighbours_are_of_other_peers_or_kinds() -> None:
    async def scenario() -> None:
        beneath = Recorder()
        transport = BatchingTransport(beneath)
        for number in range(150):
            await transport.send_frame("b", frame_of(call(number)))
        for message in (call(150), LeaseReleased(0, 5), call(151), call(152)):
            await transport.send_frame("c", frame_of(message))
        await transport.close()
        assert sorted(sizes(beneath.frames)) == [1, 1, 2, 22, 64, 64]

    asyncio.run(scenario())


def test_a_batch_of_large_messages_is_shorter() -> None:
    async def scenario() -> None:
        beneath = Recorder()
        transport = BatchingTransport(beneath)
        for number in range(8):
            await transport.send_frame("b", frame_of(call(number, "#" * 400_000)))
        await transport.close()
        assert sizes(beneath.frames) == [3, 3, 2]

    asyncio.run(scenario())


def test_while_the_way_is_full_64_messages_wait_and_then_the_sender() -> None:
    async def scenario() -> None:
        beneath = Recorder()
        transport = BatchingTransport(beneath)
        beneath.open.clear()
        for number in range(64):  # the writer takes these along and waits with them
            await transport.send_frame("b", frame_of(call(number)))
        await rounds(2)
        for number in range(64):
            await transport.send_frame("b", frame_of(call(number)))
        sending = asyncio.create_task(transport.send_frame("b", frame_of(call(128))))
        await rounds(50)
        assert not sending.done()
        beneath.open.set()
        await sending
        await transport.close()
        assert sizes(beneath.frames) == [64, 64, 1]

    asyncio.run(scenario())


def test_closing_does_not_wait_for_a_peer_that_never_comes() -> None:
    async def scenario() -> None:
        beneath = Recorder()
        transport = BatchingTransport(beneath)
        beneath.open.clear()
        await transport.send_frame("b", frame_of(call(0)))
        await transport.close()
        with pytest.raises(ConnectionError):
            await transport.send_frame("b", frame_of(call(1)))

    run_virtually(scenario())


def test_what_the_transport_raises_reaches_the_next_sender() -> None:
    class Broken(Recorder):
        async def send_frame(self, process: str, frame: bytes) -> None:
            raise OSError("no such socket")

    async def scenario() -> None:
        transport = BatchingTransport(Broken())
        await transport.send_frame("b", frame_of(call(0)))
        await rounds(3)
        with pytest.raises(OSError, match="no such socket"):
            await transport.send_frame("b", frame_of(call(1)))
        await transport.close()

    asyncio.run(scenario())


def test_a_receiver_gets_the_envelopes_of_a_batch_as_they_were_sent() -> None:
    frames = [frame_of(call(number)) for number in range(40)]
    assert list(split(encode_batch(frames))) == frames
    assert list(split(frames[0])) == frames[:1]
    broken = encode_batch(frames)[:-1]
    assert list(split(broken)) == [broken]
    with pytest.raises(MalformedFrame):
        decode(broken)


@pytest.mark.parametrize("address", ["a", "executor-0/1", "a" * 31, "a" * 32, "a" * 255, "a" * 256])
def test_a_kind_is_known_by_its_head_whatever_the_addresses(address: str) -> None:
    heads = (head_of(CodeRequested), head_of(SessionEnded))
    for envelope in (Envelope(address, "b", call(7)), Envelope("b", address, SessionEnded(7))):
        assert begins_with(encode(envelope), heads) == (len(address) < 256)
    assert not begins_with(encode(Envelope(address, address, LeaseReleased(7, 5))), heads)


@pytest.mark.parametrize("frame", [b"", b"\x93", b"\x93\xa1a", b"\x93\xd9", b"\xc1 nonsense"])
def test_what_is_no_envelope_has_no_kind(frame: bytes) -> None:
    assert not begins_with(frame, (head_of(CodeRequested),))
