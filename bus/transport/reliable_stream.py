"""One lane of one link as two state machines: SendWindow numbers and holds frames, ReceiveWindow orders them.

ReceiveWindow accepts each frame once, in order. Both use no clock, socket or task. The network can lose, duplicate and
reorder packets and acknowledgements, and either process can be restarted:

- Frames are numbered from 0 in each epoch of the sender. A frame is addressed to one epoch of the
  receiver, which the answer to a probe contains; a receiver in another epoch does not accept the
  frame.
- Acknowledgements are cumulative: each contains the numbers of frames that have arrived and of frames
  that are processed. The sender drops processed frames; the other frames are its window, bounded in messages
  and bytes.
- A receiver that gets a packet with a new epoch of the sender starts at `base`, the lowest number that
  the sender holds.
- The sender resends from the first frame that has not arrived if the receiver is a new
  incarnation, reports a gap before a packet, or has not received all frames sent before a probe.
  Delayed frames are not resent.
- A higher epoch of the sender replaces a lower one; packets of the lower epoch are dropped.
"""

from collections import deque
from collections.abc import Sequence

from asterism.bus.transport.packets import (
    MAX_FRAME_BYTES,
    MAX_PACKET_FRAMES,
    TARGET_PACKET_BYTES,
    UNKNOWN_EPOCH,
    Ack,
    Packet,
)

_NO_FRAMES: list[bytes] = []


class SendWindow:
    """The sender's side of a lane. It holds the frames from `base` up to, not including, `next_number`."""

    __slots__ = (
        *("_epoch", "_peer", "_process", "_receiver_epoch", "_receiver_queried", "_resend_round", "_sent"),
        *("_unsent", "base", "num_bytes", "received_below"),
    )

    def __init__(self, process: str, epoch: int, peer: str) -> None:
        self._process = process
        self._peer = peer
        self._epoch = epoch
        self._receiver_epoch = UNKNOWN_EPOCH
        self._receiver_queried = False  # whether a probe for the receiver's epoch was sent
        self._resend_round = 0  # answers to packets of earlier rounds do not report a gap
        self._sent: deque[bytes] = deque()
        self._unsent: deque[bytes] = deque()
        self.base = 0
        self.num_bytes = 0  # bytes of the held frames
        self.received_below = 0  # `received_below` of the latest acknowledgement

    @property
    def num_buffered(self) -> int:
        return len(self._sent) + len(self._unsent)

    @property
    def num_unsent(self) -> int:
        return len(self._unsent)

    @property
    def next_number(self) -> int:
        return self.base + len(self._sent) + len(self._unsent)

    @property
    def _next_to_send(self) -> int:
        return self.base + len(self._sent)

    def restore(self, next_number: int, frames: Sequence[bytes]) -> None:
        """Restore a link. `frames`: unacknowledged frames of an earlier incarnation, before `next_number`."""
        assert not self.next_number, "restore a link before sending on it"
        self.base = next_number - len(frames)
        self._unsent.extend(frames)
        self.num_bytes = sum(map(len, frames))

    def add(self, frame: bytes) -> None:
        """Add a frame. Raises ValueError for a frame that is too long for any receiver."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes cannot be sent; {MAX_FRAME_BYTES} are allowed")
        self._unsent.append(frame)
        self.num_bytes += len(frame)

    def build_packet(self) -> Packet | None:
        """Return the next packet, or None: frames, or one probe while the receiver's epoch is unknown."""
        if not self._unsent:
            return None
        if self._receiver_epoch == UNKNOWN_EPOCH:
            if self._receiver_queried:
                return None
            self._receiver_queried = True
            return self.build_probe()
        first, frames, num_bytes = self._next_to_send, list[bytes](), 0
        unsent, sent = self._unsent, self._sent
        while unsent and num_bytes < TARGET_PACKET_BYTES and len(frames) < MAX_PACKET_FRAMES:
            frame = unsent.popleft()
            sent.append(frame)
            frames.append(frame)
            num_bytes += len(frame)
        return self._make_packet(first, frames)

    def build_probe(self) -> Packet:
        return self._make_packet(self._next_to_send, _NO_FRAMES)

    def _make_packet(self, first: int, frames: list[bytes]) -> Packet:
        return Packet(
            self._process, self._peer, self._epoch, self._receiver_epoch, self._resend_round, self.base, first, frames
        )

    def on_send_refused(self, packet: Packet) -> None:
        """Take the latest packet back, which the wire has not accepted."""
        if packet.frames:
            self._seek(packet.first)
        else:
            self._receiver_queried = False

    def on_ack(self, ack: Ack) -> bool:
        """Apply an acknowledgement. Return False if it is invalid, for another epoch, or of an earlier receiver."""
        if (
            ack.epoch != self._epoch
            or ack.receiver_epoch < self._receiver_epoch
            or ack.acknowledged_below > ack.received_below
        ):
            return False
        if ack.received_below > self.next_number:
            return False
        is_new = ack.receiver_epoch > self._receiver_epoch
        self._receiver_epoch = ack.receiver_epoch
        self.received_below = ack.received_below if is_new else max(self.received_below, ack.received_below)
        while self.base < ack.acknowledged_below:
            self.num_bytes -= len((self._sent or self._unsent).popleft())
            self.base += 1
        if is_new or (ack.resend_round == self._resend_round and ack.received_below < ack.sent_before):
            self._resend_round += 1
            self._seek(ack.received_below)
        elif ack.received_below > self._next_to_send:
            self._seek(ack.received_below)
        return True

    def drop_buffered(self) -> int:
        """Drop all frames and return their number; numbering continues."""
        num_dropped = self.num_buffered
        self.base = self.received_below = self.next_number
        self._sent.clear()
        self._unsent.clear()
        self.num_bytes = 0
        return num_dropped

    def _seek(self, number: int) -> None:
        """Continue sending from this frame, or from the nearest frame that is held."""
        while self._sent and self._next_to_send > number:
            self._unsent.appendleft(self._sent.pop())
        while self._unsent and self._next_to_send < number:
            self._sent.append(self._unsent.popleft())


class ReceiveWindow:
    """The receiver's side of a lane. `epoch` is the sender's epoch, `expected` the number of the next frame."""

    __slots__ = (
        *("_own_epoch", "_resend_requested", "_resend_round", "_sent_before"),
        *("ack_due", "acknowledged", "epoch", "expected", "num_dropped"),
    )

    def __init__(self, own_epoch: int, epoch: int = UNKNOWN_EPOCH, expected: int = 0) -> None:
        self._own_epoch = own_epoch
        self._sent_before = 0
        self._resend_round = 0
        self._resend_requested = UNKNOWN_EPOCH  # number of the first frame of the last resend request
        self.epoch = epoch
        self.expected = expected
        self.acknowledged = expected
        self.ack_due = False
        self.num_dropped = 0  # duplicate frames, and packets of an old epoch

    def accept(self, packet: Packet) -> list[bytes]:
        """Return the new frames; the last one has the number `expected` - 1."""
        if packet.epoch < self.epoch:
            self.num_dropped += 1
            return _NO_FRAMES
        if packet.epoch > self.epoch:
            self.epoch, self.expected, self.acknowledged = packet.epoch, packet.base, packet.base
            self._sent_before, self._resend_requested = 0, UNKNOWN_EPOCH
        elif packet.base > self.expected:  # the sender has dropped the frames between both numbers
            self.expected = packet.base
        if not packet.frames:
            self._schedule_ack(packet, packet.first)
            return _NO_FRAMES
        if packet.receiver_epoch != self._own_epoch:
            self._schedule_ack(packet, 0)
            return _NO_FRAMES
        if packet.first > self.expected:
            if self._resend_requested != self.expected:
                self._resend_requested = self.expected
                self._schedule_ack(packet, packet.first)
            return _NO_FRAMES
        return self._accept_in_order(packet)

    def _accept_in_order(self, packet: Packet) -> list[bytes]:
        num_known = self.expected - packet.first
        if num_known == 0:
            self.expected += len(packet.frames)
            return packet.frames
        new = packet.frames[num_known:]
        self.num_dropped += len(packet.frames) - len(new)
        self.expected += len(new)
        if not new:
            self._schedule_ack(packet, 0)  # the previous acknowledgement can be lost
        return new

    def _schedule_ack(self, packet: Packet, sent_before: int) -> None:
        self._resend_round, self._sent_before = packet.resend_round, sent_before
        self.ack_due = True

    def acknowledge(self, epoch: int, number: int) -> bool:
        """Mark frames up to this number as processed; return whether this is new."""
        if epoch != self.epoch or number < self.acknowledged or number >= self.expected:
            return False
        self.acknowledged = number + 1
        return True

    def build_ack(self) -> Ack:
        sent_before, self._sent_before, self.ack_due = self._sent_before, 0, False
        acknowledged = min(self.acknowledged, self.expected)
        return Ack(self.epoch, self._own_epoch, self.expected, acknowledged, self._resend_round, sent_before)
