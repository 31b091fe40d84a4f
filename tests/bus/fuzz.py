"""`make fuzz`, or `python -m tests.bus.fuzz [--inputs 1000000] [--seed N]`: decode damaged input.

The inputs are randomly damaged frames of every kind, packets and acknowledgements. The codec must return a
message or raise MalformedFrame; the decoders of packets must return a packet or raise MalformedPacket; the
state machines of a lane must keep their invariants.
"""

import argparse
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable

from asterism.bus.codec import MalformedFrame, decode, encode
from asterism.bus.lanes import LANES, select_frame_lane
from asterism.bus.transport.packets import (
    Ack,
    MalformedPacket,
    Packet,
    decode_ack,
    decode_packet,
    encode_ack,
    encode_packet,
)
from asterism.bus.transport.reliable_stream import ReceiveWindow, SendWindow
from tests.bus.samples import KINDS, envelope

INPUTS = 1_000_000
OWN_EPOCH = 3
_SPECIAL = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xCA, 0xCF, 0xD3, 0xD6, 0xD9)
_SPECIALS = bytes((*_SPECIAL, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF))
_LONG = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")

Change = Callable[[bytes, random.Random], bytes]


def _draw_position(data: bytes, draw: random.Random) -> int:
    return draw.randrange(len(data) + 1)


def flip(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, draw: random.Random) -> bytes:
    at = _draw_position(data, draw)
    return data[:at] + bytes((draw.choice(_SPECIALS),)) + data[at + 1 :]


def truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: _draw_position(data, draw)]


def delete_bytes(data: bytes, draw: random.Random) -> bytes:
    at = _draw_position(data, draw)
    return data[:at] + data[at + draw.randrange(1, 9) :]


def insert(data: bytes, draw: random.Random) -> bytes:
    at = _draw_position(data, draw)
    return data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]


def repeat(data: bytes, draw: random.Random) -> bytes:
    at = _draw_position(data, draw)
    return data[:at] + data[max(0, at - draw.randrange(1, 33)) :]


def insert_false_length(data: bytes, draw: random.Random) -> bytes:
    at = _draw_position(data, draw)
    return data[:at] + draw.choice(_LONG) + data[at + 1 :]


def nest(data: bytes, draw: random.Random) -> bytes:
    at = _draw_position(data, draw)
    return data[:at] + draw.choice((b"\x91", b"\x81\xc0")) * draw.choice((2, 50, 5000)) + data[at:]


def lengthen(data: bytes, draw: random.Random) -> bytes:
    """Increment the first byte, which can be the length of an array, and add random bytes."""
    return (bytes((data[0] + 1,)) if data and data[0] < 0xFF else b"") + data[1:] + draw.randbytes(3)


_CHANGES: tuple[Change, ...] = (
    *(flip, flip, flip, overwrite, overwrite, truncate, delete_bytes, insert, repeat, insert_false_length, lengthen),
    *((flip, overwrite, insert) * 6),
    nest,
)


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._frames = [encode(envelope(kind, self._draw)) for kind in KINDS for _ in range(4)]
        self._receive_window = ReceiveWindow(OWN_EPOCH)
        self._send_window = SendWindow("a", 1, "b")
        self.outcomes: Counter[str] = Counter()
        self._targets = (self._fuzz_frame, self._fuzz_frame, self._fuzz_packet, self._fuzz_ack)

    def run(self, inputs: int) -> None:
        """Fuzz all targets in turn. An error raises AssertionError or another exception."""
        for number in range(inputs):
            self._targets[number % 4]()

    def _damage(self, data: bytes) -> bytes:
        draw = self._draw
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            data = draw.choice(_CHANGES)(data, draw)
        return data if draw.random() > 0.02 else draw.randbytes(draw.randrange(60))

    def _fuzz_frame(self) -> None:
        data = self._damage(self._draw.choice(self._frames))
        assert select_frame_lane(data) in LANES
        try:
            message = decode(data)
        except MalformedFrame:
            self.outcomes["frames refused"] += 1
            return
        again = encode(message)
        assert encode(decode(again)) == again
        self.outcomes["frames read"] += 1

    def _fuzz_packet(self) -> None:
        draw = self._draw
        first = self._receive_window.expected + draw.randrange(-3, 4)
        frames = [draw.choice(self._frames) for _ in range(draw.randrange(4))]
        epoch, receiver = draw.choice((self._receive_window.epoch, 1)), draw.choice((OWN_EPOCH, OWN_EPOCH, 2))
        base = max(0, min(first, self._receive_window.acknowledged))
        data = encode_packet(Packet("a", "b", max(0, epoch), receiver, 0, base, max(0, first), frames))
        try:
            packet = decode_packet(self._damage(data) if draw.random() < 0.9 else data)
        except MalformedPacket:
            self.outcomes["packets refused"] += 1
            return
        self._check_accept(packet)
        self.outcomes["packets read"] += 1
        if self._receive_window.epoch > 1 or self._receive_window.expected > 1 << 40:
            self._receive_window = ReceiveWindow(OWN_EPOCH)  # no later random packet could continue these numbers

    def _check_accept(self, packet: Packet) -> None:
        receive_window = self._receive_window
        epoch, expected, dropped = receive_window.epoch, receive_window.expected, receive_window.num_dropped
        new = receive_window.accept(packet)
        assert receive_window.num_dropped >= dropped
        assert receive_window.epoch >= epoch
        assert len(new) <= len(packet.frames)
        if receive_window.epoch == epoch:
            assert receive_window.expected >= expected + len(new)
        if new:
            assert receive_window.expected == packet.first + len(packet.frames)
            receive_window.acknowledge(receive_window.epoch, receive_window.expected - 1 - self._draw.randrange(3))
        ack = receive_window.build_ack()
        assert decode_ack(encode_ack(ack)) == ack
        assert ack.acknowledged_below <= ack.received_below

    def _fuzz_ack(self) -> None:
        draw, send_window = self._draw, self._send_window
        while send_window.num_buffered < 4:
            send_window.add(draw.choice(self._frames))
        received = send_window.base + draw.randrange(5)
        acknowledged = draw.randrange(received + 1) if draw.random() < 0.5 else received
        data = encode_ack(Ack(1, draw.choice((0, 1)), received, acknowledged, 0, received + draw.randrange(-1, 2) + 1))
        try:
            ack = decode_ack(self._damage(data) if draw.random() < 0.9 else data)
        except MalformedPacket:
            self.outcomes["acknowledgements refused"] += 1
            return
        base, next_number = send_window.base, send_window.next_number
        is_valid = send_window.on_ack(ack)
        assert base <= send_window.base <= (ack.acknowledged_below if send_window.base > base else base)
        assert send_window.next_number == next_number
        packet = send_window.build_packet()
        assert packet is None or send_window.base <= packet.first <= send_window.next_number
        self.outcomes["acknowledgements accepted" if is_valid else "acknowledgements refused as invalid"] += 1
        if ack.receiver_epoch > 1:
            self._send_window = SendWindow("a", 1, "b")  # the old window refuses all lower epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)  # noqa: T201
    fuzzer = Fuzzer(options.seed)
    began = time.perf_counter()
    fuzzer.run(options.inputs)
    took_s = time.perf_counter() - began
    for outcome, count in sorted(fuzzer.outcomes.items()):
        print(f"{count:12,} {outcome}")  # noqa: T201
    print(f"{options.inputs:12,} inputs in {took_s:.1f} s, {options.inputs / took_s:,.0f} a second")  # noqa: T201


if __name__ == "__main__":
    main()
