"""Tests: the state machines of a lane deliver each frame once, despite network faults and restarts of both sides."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asterism.bus.transport.packets import MAX_PACKET_FRAMES, TARGET_PACKET_BYTES, Ack, Packet
from asterism.bus.transport.reliable_stream import ReceiveWindow, SendWindow


def make_frame(number: int) -> bytes:
    return number.to_bytes(4 + number % 3, "big")


def make_send_window(epoch: int = 1, frames: int = 0) -> SendWindow:
    send_window = SendWindow("a", epoch, "b")
    for number in range(frames):
        send_window.add(make_frame(number))
    return send_window


def build_packet(send_window: SendWindow) -> Packet:
    packet = send_window.build_packet()
    assert packet is not None
    return packet


def handshake(send_window: SendWindow, receive_window: ReceiveWindow) -> None:
    probe = build_packet(send_window)
    assert probe.frames == []
    assert receive_window.accept(probe) == []
    assert send_window.on_ack(receive_window.build_ack())


def connect(frames: int) -> tuple[SendWindow, ReceiveWindow]:
    """Return both ends of a lane after the handshake; the sender has this number of queued frames."""
    send_window, receive_window = make_send_window(frames=frames), ReceiveWindow(0)
    handshake(send_window, receive_window)
    return send_window, receive_window


def test_frames_are_sent_to_a_known_receiver() -> None:
    send_window, receive_window = make_send_window(frames=3), ReceiveWindow(own_epoch=5)
    handshake(send_window, receive_window)
    packet = send_window.build_packet()
    assert packet == Packet("a", "b", 1, 5, 1, 0, 0, [make_frame(number) for number in range(3)])
    assert receive_window.accept(packet) == packet.frames
    assert send_window.build_packet() is None
    assert not receive_window.ack_due


def test_an_unknown_receiver_is_probed_once() -> None:
    send_window = make_send_window(frames=1)
    assert send_window.build_packet() == send_window.build_probe()
    assert send_window.build_packet() is None


def test_a_packet_is_bounded_in_frames_and_bytes() -> None:
    send_window, _ = connect(frames=MAX_PACKET_FRAMES + 1)
    assert [len(build_packet(send_window).frames) for _ in range(2)] == [MAX_PACKET_FRAMES, 1]
    for _ in range(3):
        send_window.add(bytes(TARGET_PACKET_BYTES - 1))
    assert [len(build_packet(send_window).frames) for _ in range(2)] == [2, 1]


def test_acknowledged_frames_are_dropped_and_received_frames_are_held() -> None:
    send_window, receive_window = connect(frames=4)
    receive_window.accept(build_packet(send_window))
    send_window.add(make_frame(4))
    assert receive_window.acknowledge(1, 1)
    assert send_window.on_ack(receive_window.build_ack())
    assert (send_window.base, send_window.received_below) == (2, 4)
    assert (send_window.num_buffered, send_window.num_bytes) == (3, 6 + 4 + 5)
    assert send_window.build_packet() == Packet("a", "b", 1, 0, 1, 2, 4, [make_frame(4)])
    assert not receive_window.acknowledge(1, 0)
    assert not receive_window.acknowledge(1, 4)
    assert not receive_window.acknowledge(0, 2)


def test_a_missing_packet_is_requested_once_and_delayed_packets_are_not_resent() -> None:
    send_window, receive_window = connect(frames=1)
    build_packet(send_window)  # this packet is lost
    for number in (1, 2):
        send_window.add(make_frame(number))
        later = build_packet(send_window)
        assert receive_window.accept(later) == []
        assert receive_window.ack_due == (number == 1)
        if receive_window.ack_due:
            answer = receive_window.build_ack()
    assert send_window.on_ack(Ack(1, 0, 0, 0, 1, 0))  # an acknowledgement that reports no gap
    assert send_window.build_packet() is None
    assert send_window.on_ack(answer)  # pyright: ignore[reportPossiblyUnboundVariable]
    resent = build_packet(send_window)
    assert resent.first == 0
    assert len(receive_window.accept(resent)) == 3


def test_a_duplicate_packet_is_dropped_and_counted() -> None:
    send_window, receive_window = connect(frames=3)
    packet = build_packet(send_window)
    assert len(receive_window.accept(packet)) == 3
    assert receive_window.accept(packet) == []
    assert receive_window.num_dropped == 3
    assert receive_window.ack_due


def test_a_new_incarnation_of_the_receiver_gets_unacknowledged_frames() -> None:
    send_window, old, new = make_send_window(frames=4), ReceiveWindow(own_epoch=1), ReceiveWindow(own_epoch=2)
    handshake(send_window, old)
    packet = build_packet(send_window)
    old.accept(packet)
    old.acknowledge(1, 0)
    send_window.on_ack(old.build_ack())
    assert new.accept(packet) == []  # this packet has the epoch of the old incarnation
    assert send_window.on_ack(new.build_ack())
    resent = build_packet(send_window)
    assert new.accept(resent) == [make_frame(number) for number in (1, 2, 3)]
    assert not send_window.on_ack(Ack(1, 1, 4, 4, 1, 0))  # the old incarnation sent this answer
    assert send_window.num_buffered == 3


def test_a_higher_epoch_of_the_sender_replaces_a_lower_one() -> None:
    receive_window = ReceiveWindow(0)
    old, new = make_send_window(1, 2), make_send_window(2, 3)
    handshake(old, receive_window)
    late = build_packet(old)
    handshake(new, receive_window)
    packet = build_packet(new)
    assert len(receive_window.accept(packet)) == 3
    assert receive_window.accept(late) == []
    assert receive_window.num_dropped == 1
    assert not receive_window.ack_due


def test_a_restored_sender_keeps_its_numbers_and_skips_received_frames() -> None:
    send_window, receive_window = connect(frames=5)
    receive_window.accept(build_packet(send_window))
    resent = make_send_window()
    resent.restore(7, [make_frame(number) for number in range(2, 7)])
    handshake(resent, receive_window)
    packet = build_packet(resent)
    assert (packet.base, packet.first) == (2, 5)
    assert receive_window.accept(packet) == [make_frame(5), make_frame(6)]


def test_numbering_continues_after_frames_are_dropped() -> None:
    send_window, receive_window = connect(frames=5)
    send_window.drop_buffered()
    send_window.add(make_frame(5))
    assert (send_window.num_buffered, send_window.num_bytes, send_window.next_number) == (1, 6, 6)
    packet = build_packet(send_window)
    assert receive_window.accept(packet) == [make_frame(5)]
    assert receive_window.acknowledge(1, 5)
    assert send_window.on_ack(receive_window.build_ack())
    assert send_window.num_buffered == 0


def test_a_late_answer_of_an_earlier_resend_causes_no_second_resend() -> None:
    send_window, receive_window = connect(frames=2)
    send_window.build_packet()  # this packet is lost
    answers: list[Ack] = []
    for _ in range(2):
        receive_window.accept(send_window.build_probe())
        answers.append(receive_window.build_ack())
    assert send_window.on_ack(answers[0])
    assert send_window.build_packet()
    assert send_window.on_ack(answers[1])
    assert send_window.build_packet() is None


def test_frames_that_arrive_late_are_not_resent() -> None:
    send_window, receive_window = connect(frames=3)
    delayed = build_packet(send_window)
    receive_window.accept(send_window.build_probe())
    assert send_window.on_ack(receive_window.build_ack())
    assert send_window.num_unsent == 3
    receive_window.accept(delayed)
    receive_window.acknowledge(1, 0)
    assert send_window.on_ack(receive_window.build_ack())
    assert (send_window.num_unsent, send_window.num_buffered) == (0, 2)


@pytest.mark.parametrize(
    "ack", [Ack(0, 0, 1, 1, 1, 0), Ack(1, 0, 9, 0, 1, 0), Ack(1, 0, 0, 1, 1, 0), Ack(1, -1, 1, 1, 1, 0)]
)
def test_an_invalid_acknowledgement_is_refused(ack: Ack) -> None:
    send_window, _ = connect(frames=3)
    send_window.build_packet()
    assert not send_window.on_ack(ack)
    assert (send_window.num_buffered, send_window.received_below) == (3, 0)


class Link(RuleBasedStateMachine):
    """A send window that restores its state. The receiver restores its state (`durable`) or starts a new epoch."""

    @initialize(durable=st.booleans())
    def begin(self, durable: bool) -> None:
        self.durable = durable
        self.receiver_epoch = 1
        self.send_window = SendWindow("a", 1, "b")
        self.receive_window = ReceiveWindow(1)
        self.wire: list[Packet | Ack] = []
        self.num_sent = 0
        self.received: list[int] = []  # numbers of frames that this incarnation has received
        self.delivered = 0  # lowest number of the frames that no incarnation has acknowledged
        self.first_expected = 0  # this incarnation must not receive frames with lower numbers

    @rule(count=st.integers(1, 5), is_flushed=st.booleans())
    def send(self, count: int, is_flushed: bool) -> None:
        for _ in range(count):
            self.send_window.add(make_frame(self.num_sent))
            self.num_sent += 1
        while is_flushed and (packet := self.send_window.build_packet()) is not None:
            self.wire.append(packet)

    @rule()
    def probe(self) -> None:
        self.wire.append(self.send_window.build_probe())

    @precondition(lambda self: self.wire)
    @rule(index=st.integers(0, 1_000), repeated=st.booleans())
    def arrive(self, index: int, repeated: bool) -> None:
        index %= len(self.wire)
        item = self.wire[index] if repeated else self.wire.pop(index)
        if isinstance(item, Ack):
            self.send_window.on_ack(item)
            while (packet := self.send_window.build_packet()) is not None:
                self.wire.append(packet)
            return
        frames = self.receive_window.accept(item)
        self.received += [int.from_bytes(frame, "big") for frame in frames]
        if self.receive_window.ack_due:
            self.wire.append(self.receive_window.build_ack())

    @precondition(lambda self: self.wire)
    @rule(index=st.integers(0, 1_000), count=st.integers(1, 8))
    def drop_from_wire(self, index: int, count: int) -> None:
        index %= len(self.wire)
        del self.wire[index : index + count]

    @precondition(lambda self: self.received)
    @rule(index=st.integers(0, 1_000), is_sent=st.booleans())
    def acknowledge(self, index: int, is_sent: bool) -> None:
        number = self.received[index % len(self.received)]
        if self.receive_window.acknowledge(1, number):
            self.delivered = max(self.delivered, number + 1)
            if is_sent:
                self.wire.append(self.receive_window.build_ack())

    @rule()
    def restart_receiver(self) -> None:
        """Restart the receiver, either with its state or in a new epoch."""
        self.first_expected = self.delivered if self.durable else self.send_window.base
        if self.durable:
            self.receive_window = ReceiveWindow(1, 1, self.delivered)
        else:
            self.receiver_epoch += 1
            self.receive_window = ReceiveWindow(self.receiver_epoch)
        self.received = []

    @rule()
    def restart_sender(self) -> None:
        base, held = self.send_window.base, range(self.send_window.base, self.num_sent)
        self.send_window = SendWindow("a", 1, "b")
        self.send_window.restore(self.num_sent, [make_frame(number) for number in held])
        assert self.send_window.base == base

    @invariant()
    def each_arrives_once_and_in_order(self) -> None:
        if self.received:
            assert self.received == list(range(self.received[0], self.received[-1] + 1))
            assert self.first_expected <= self.received[0] <= self.delivered

    @invariant()
    def dropped_frames_are_acknowledged(self) -> None:
        assert self.send_window.base <= self.delivered
        assert self.send_window.next_number == self.num_sent
        held = range(self.send_window.base, self.num_sent)
        assert self.send_window.num_bytes == sum(len(make_frame(number)) for number in held)

    def teardown(self) -> None:
        """Check that all frames arrive after the wire is repaired."""
        if not hasattr(self, "wire"):
            return
        self.wire.clear()
        for _ in range(6):
            self.wire.append(self.send_window.build_probe())
            while self.wire:
                self.arrive(0, False)
        if self.received:
            self.receive_window.acknowledge(1, self.received[-1])
            assert self.received[-1] == self.num_sent - 1
        self.send_window.on_ack(self.receive_window.build_ack())
        assert self.send_window.num_buffered == 0


Link.TestCase.settings = settings(stateful_step_count=60)
TestLink = pytest.mark.slow(Link.TestCase)
