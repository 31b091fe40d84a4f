"""Tests, under a virtual clock, of the packets, probes and acknowledgements that a process sends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from asterism.bus.bus import Inbox
from asterism.bus.lanes import BULK, CONTROL, Lane
from asterism.bus.transport.packets import MAX_FRAME_BYTES, TARGET_PACKET_BYTES, Ack, Packet
from asterism.bus.transport.reliable_transport import LinkLimits, ReliableTransport

PEER_EPOCH = 7


class RecordingWire:
    """A wire that records packets, or refuses them while `is_full`."""

    def __init__(self) -> None:
        self.is_full = False
        self.packets: list[tuple[str, Lane, Packet]] = []
        self.disconnected: list[str] = []

    def send(self, process: str, lane: Lane, packet: Packet) -> bool:
        if not self.is_full:
            self.packets.append((process, lane, packet))
        return not self.is_full

    def disconnect(self, process: str) -> None:
        self.disconnected.append(process)

    async def close(self) -> None:
        pass

    def count_frames(self, process: str = "b", lane: Lane = BULK) -> list[int]:
        """Return the number of frames of each packet. A probe has 0 frames."""
        return [len(packet.frames) for to, on, packet in self.packets if (to, on) == (process, lane)]


@pytest.fixture
def wire() -> RecordingWire:
    return RecordingWire()


@pytest.fixture
def limits() -> LinkLimits:
    return LinkLimits(1000)


@pytest.fixture
@asynccontextmanager
async def transport(wire: RecordingWire, limits: LinkLimits) -> AsyncIterator[ReliableTransport]:
    transport = ReliableTransport("a", 1, Inbox(100), limits)
    transport.wire = wire
    yield transport


async def run_loop(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def send(transport: ReliableTransport, count: int, size: int = 1, lane: Lane = BULK, to: str = "b") -> None:
    for _ in range(count):
        await transport.send_frame(to, lane, bytes(size))


def receive_ack(
    transport: ReliableTransport,
    received: int,
    acknowledged: int,
    *,
    sent_before: int = 0,
    resend_round: int = 1,
    lane: Lane = BULK,
) -> None:
    transport.on_ack("b", lane, Ack(1, PEER_EPOCH, received, acknowledged, resend_round, sent_before))


async def connect(transport: ReliableTransport, count: int, size: int = 1) -> None:
    """Send frames to a peer, which answers the probe."""
    await send(transport, count, size)
    await run_loop()
    receive_ack(transport, 0, 0)


def receive_frames(transport: ReliableTransport, first: int, count: int, acks: list[Ack], lane: Lane = BULK) -> None:
    transport.on_packet(lane, Packet("b", "a", PEER_EPOCH, 1, 0, 0, first, [b"x"] * count), acks.append)


async def test_frames_of_one_loop_iteration_share_a_packet(transport: ReliableTransport, wire: RecordingWire) -> None:
    await send(transport, 5)
    assert wire.packets == []
    await run_loop()
    assert wire.count_frames() == [0]  # this packet is a probe
    receive_ack(transport, 0, 0)
    assert wire.count_frames() == [0, 5]
    await send(transport, 1)
    await send(transport, 2, lane=CONTROL)
    await run_loop()
    assert wire.count_frames() == [0, 5, 1]
    assert wire.count_frames(lane=CONTROL) == [0]


async def test_full_packets_are_sent_immediately(transport: ReliableTransport, wire: RecordingWire) -> None:
    await connect(transport, 1)
    await send(transport, 600)
    assert wire.count_frames() == [0, 1, 256, 256]
    await run_loop()
    assert wire.count_frames() == [0, 1, 256, 256, 88]


@pytest.mark.parametrize("limits", [LinkLimits(8), LinkLimits(1000, window_bytes=8)])
async def test_a_sender_waits_while_the_window_is_full(transport: ReliableTransport, wire: RecordingWire) -> None:
    sending = asyncio.create_task(send(transport, 20))
    other = asyncio.create_task(send(transport, 1, lane=CONTROL))
    await run_loop()
    receive_ack(transport, 0, 0)
    await run_loop()
    assert (transport.unacknowledged, sending.done(), other.done()) == ({"b": 9}, False, True)
    receive_ack(transport, 8, 0)
    await run_loop()
    assert transport.unacknowledged == {"b": 9}
    receive_ack(transport, 8, 8)
    await run_loop(20)
    assert sum(wire.count_frames()) == 16
    receive_ack(transport, 16, 16)
    await sending
    await run_loop()
    assert sum(wire.count_frames()) == 20


@pytest.mark.parametrize("limits", [LinkLimits(1000, window_bytes=8)])
async def test_one_frame_can_exceed_the_window(transport: ReliableTransport, wire: RecordingWire) -> None:
    await send(transport, 1, size=100)
    waiting = asyncio.create_task(send(transport, 1))
    await run_loop()
    receive_ack(transport, 0, 0)
    assert (wire.count_frames(), waiting.done()) == ([0, 1], False)
    receive_ack(transport, 1, 1)
    await waiting


@pytest.mark.parametrize("limits", [LinkLimits(8)])
async def test_a_cancelled_send_leaves_no_gap(transport: ReliableTransport, wire: RecordingWire) -> None:
    senders = [asyncio.create_task(send(transport, 1)) for _ in range(12)]
    await run_loop()
    senders[9].cancel()
    senders[8].cancel()
    receive_ack(transport, 0, 0)
    receive_ack(transport, 8, 8)
    await asyncio.gather(*senders, return_exceptions=True)
    await run_loop()
    numbers = [range(packet.first, packet.first + len(packet.frames)) for _, _, packet in wire.packets]
    assert [number for each in numbers for number in each] == list(range(10))


async def test_frames_wait_for_a_full_wire_in_their_order(transport: ReliableTransport, wire: RecordingWire) -> None:
    await connect(transport, 1)
    wire.is_full = True
    await send(transport, 300)
    await run_loop()
    wire.is_full = False
    await send(transport, 1)
    await run_loop()
    assert wire.count_frames() == [0, 1]
    transport.on_writable("b", BULK)
    assert [(packet.first, len(packet.frames)) for _, _, packet in wire.packets[2:]] == [(1, 256), (257, 45)]


async def test_an_unresponsive_peer_is_probed_with_growing_intervals_and_without_resending(
    transport: ReliableTransport, wire: RecordingWire
) -> None:
    await connect(transport, 3)
    await asyncio.sleep(20)
    num_probes = len(wire.count_frames()) - 2
    assert wire.count_frames() == [0, 3] + [0] * num_probes
    assert 9 <= num_probes <= 12
    receive_ack(transport, 0, 0, sent_before=3)
    assert wire.count_frames()[-1] == 3
    receive_ack(transport, 3, 3, resend_round=2)
    num_packets = len(wire.packets)
    await asyncio.sleep(20)
    assert len(wire.packets) == num_packets  # no probe follows if all frames are acknowledged


async def test_one_acknowledgement_covers_many_frames(transport: ReliableTransport) -> None:
    acks: list[Ack] = []
    receive_frames(transport, 0, 0, acks)
    for number in range(10):
        receive_frames(transport, 5 * number, 5, acks)
    assert len(acks) == 1
    for _ in range(40):
        transport.acknowledge(await transport.inbox.get())
    await asyncio.sleep(1)
    assert [(ack.received_below, ack.acknowledged_below) for ack in acks] == [(0, 0), (50, 40)]
    await asyncio.sleep(1)
    assert len(acks) == 2


@pytest.mark.parametrize("limits", [LinkLimits(16)])
async def test_a_received_quarter_of_a_window_is_acknowledged_immediately(transport: ReliableTransport) -> None:
    acks: list[Ack] = []
    receive_frames(transport, 0, 12, acks)
    for _ in range(10):
        transport.acknowledge(await transport.inbox.get())
    assert [ack.acknowledged_below for ack in acks] == [4, 8]


async def test_probes_gaps_and_duplicates_are_answered_immediately(transport: ReliableTransport) -> None:
    acks: list[Ack] = []
    receive_frames(transport, 0, 2, acks)
    receive_frames(transport, 4, 2, acks)
    receive_frames(transport, 0, 2, acks)
    receive_frames(transport, 2, 0, acks)
    assert [(ack.received_below, ack.sent_before) for ack in acks] == [(2, 4), (2, 0), (2, 2)]
    assert transport.dropped == 2
    assert len(transport.inbox) == 2


async def test_closing_waits_at_most_half_a_second_for_missing_acknowledgements(transport: ReliableTransport) -> None:
    await send(transport, 1)
    closing = asyncio.create_task(transport.close())
    await asyncio.sleep(0.4)
    assert not closing.done()
    await asyncio.sleep(0.2)
    assert closing.done()
    with pytest.raises(ConnectionError):
        await send(transport, 1)


async def test_closing_ends_when_peers_have_received_all_frames(transport: ReliableTransport) -> None:
    await send(transport, 2)
    closing = asyncio.create_task(transport.close())
    await run_loop()
    receive_ack(transport, 0, 0)
    receive_ack(transport, 2, 0)
    await asyncio.sleep(0.02)
    assert closing.done()


@pytest.mark.parametrize("limits", [LinkLimits(8)])
async def test_closing_raises_an_error_in_blocked_senders(transport: ReliableTransport) -> None:
    sending = asyncio.create_task(send(transport, 9))
    await run_loop()
    await transport.close()
    with pytest.raises(ConnectionError):
        await sending


async def test_an_oversized_frame_is_refused(transport: ReliableTransport) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return MAX_FRAME_BYTES + 1

    with pytest.raises(ValueError, match="cannot be sent"):
        await transport.send_frame("b", BULK, Long())
    assert transport.unacknowledged == {}


async def test_a_packet_of_a_mebibyte_gets_no_further_frame(transport: ReliableTransport, wire: RecordingWire) -> None:
    await connect(transport, 8, size=400_000)
    assert wire.count_frames() == [0, 3, 3, 2]
    assert TARGET_PACKET_BYTES < 3 * 400_000


async def test_packets_of_peers_above_the_limit_are_counted(
    monkeypatch: pytest.MonkeyPatch, transport: ReliableTransport
) -> None:
    monkeypatch.setattr("asterism.bus.transport.reliable_transport.MAX_IN_CHANNELS", 2)
    acks: list[Ack] = []
    for first in (0, 1):
        for sender in ("b", "c", "d"):
            transport.on_packet(BULK, Packet(sender, "a", PEER_EPOCH, 1, 0, 0, first, [b"x"]), acks.append)
    senders = [delivery.sender for delivery in iter(transport.inbox.pop, None)]
    assert senders == ["b", "c", "b", "c"]
    assert transport.num_dropped == 2


async def test_an_acknowledgement_of_another_epoch_is_dropped_and_counted(transport: ReliableTransport) -> None:
    await send(transport, 1)
    await run_loop()
    transport.on_ack("b", BULK, Ack(0, PEER_EPOCH, 1, 1, 0, 0))
    assert (transport.dropped, transport.unacknowledged) == (1, {"b": 1})


@pytest.mark.parametrize("limits", [LinkLimits(8)])
async def test_frames_for_a_departed_process_are_counted(transport: ReliableTransport, wire: RecordingWire) -> None:
    sending = asyncio.create_task(send(transport, 20))
    await run_loop()
    receive_ack(transport, 0, 0)
    await run_loop()
    with capture_logs() as lines:
        transport.drop_peer("b")
        await sending
        await send(transport, 1, lane=CONTROL)
        transport.drop_peer("b")
    assert (transport.unacknowledged, transport.dropped, wire.disconnected) == ({}, 21, ["b"])
    assert [(line["event"], line["peer"]) for line in lines] == [("frames.dropped", "b")]
    await asyncio.sleep(20)
    assert wire.count_frames() == [0, 8]
    assert wire.count_frames(lane=CONTROL) == []


async def test_frames_from_a_departed_process_are_counted_and_not_answered(transport: ReliableTransport) -> None:
    acks: list[Ack] = []
    receive_frames(transport, 0, 2, acks)
    with capture_logs() as lines:
        transport.drop_peer("b")
        assert lines == []
        receive_frames(transport, 2, 2, acks)
        receive_frames(transport, 4, 0, acks)
    assert (len(transport.inbox), transport.dropped, acks) == (2, 2, [])
    assert [line["event"] for line in lines] == ["frames.dropped"]


async def test_a_forgotten_peer_leaves_no_state_for_a_new_process_with_its_name(
    transport: ReliableTransport, wire: RecordingWire
) -> None:
    transport.on_packet(BULK, Packet("b", "a", 5, transport.epoch, 0, 3, 3, [b"x"]), lambda _: None)
    await transport.send_frame("b", BULK, b"y")
    transport.forget_peer("b")
    assert wire.disconnected == ["b"]
    assert transport.unacknowledged == {}
    transport.on_writable("b", BULK)  # a late event from the closed socket
    assert transport.on_packet(BULK, Packet("b", "a", 5, transport.epoch, 0, 0, 0, [b"z"]), lambda _: None) == 1


async def test_packets_of_refused_peers_are_dropped_and_counted(transport: ReliableTransport) -> None:
    transport.accepts_peer = {"b"}.__contains__
    for sender, accepted in (("b", 1), ("c", 0)):
        packet = Packet(sender, "a", 5, transport.epoch, 0, 0, 0, [b"x"])
        assert transport.on_packet(BULK, packet, lambda _: None) == accepted
    assert transport.dropped == 1
