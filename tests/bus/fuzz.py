"""`make fuzz`, or `python -m tests.bus.fuzz [--inputs 1000000] [--seed N]`: what strangers might send, and no harm done.

The inputs are frames of every kind, parcels and acknowledgements, changed at random. Whatever it is, the codec answers
with a message or MalformedFrame, the parcels with a parcel or MalformedParcel, and the machines of a link stay sound.
"""

from __future__ import annotations

import argparse
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable

from bus.codec import MalformedFrame, decode, encode
from bus.lanes import LANES, lane_of_frame
from bus.link import Incoming, Outgoing
from bus.parcels import Ack, MalformedParcel, Parcel, decode_ack, decode_parcel, encode_ack, encode_parcel
from tests.bus.samples import KINDS, envelope

INPUTS = 1_000_000
OWN_SESSION = 3
_SPECIAL = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC4, 0xC6, 0xC7, 0xCA, 0xCF, 0xD3, 0xD6, 0xD9)
_SPECIALS = bytes((*_SPECIAL, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xFF))
_LONG = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff")

Change = Callable[[bytes, random.Random], bytes]


def _place(data: bytes, draw: random.Random) -> int:
    return draw.randrange(len(data) + 1)


def flip(data: bytes, draw: random.Random) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + bytes((draw.choice(_SPECIALS),)) + data[at + 1 :]


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: _place(data, draw)]


def leave_out(data: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + data[at + draw.randrange(1, 9) :]


def insert(data: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:]


def repeat(data: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + data[max(0, at - draw.randrange(1, 33)) :]


def claim_length(data: bytes, draw: random.Random) -> bytes:
    at = _place(data, draw)
    return data[:at] + draw.choice(_LONG) + data[at + 1 :]


def nest(data: bytes, draw: random.Random) -> bytes:
    """A value that lies ever so deep."""
    at = _place(data, draw)
    return data[:at] + draw.choice((b"\x91", b"\x81\xc0")) * draw.choice((2, 50, 5000)) + data[at:]


def lengthen(data: bytes, draw: random.Random) -> bytes:
    """One more element than there should be."""
    return (bytes((data[0] + 1,)) if data and data[0] < 0xFF else b"") + data[1:] + draw.randbytes(3)


_CHANGES: tuple[Change, ...] = (
    *(flip, flip, flip, overwrite, overwrite, cut, leave_out, insert, repeat, claim_length, lengthen),
    *((flip, overwrite, insert) * 6),
    nest,
)


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._frames = [encode(envelope(kind, self._draw)) for kind in KINDS for _ in range(4)]
        self._incoming = Incoming(OWN_SESSION)
        self._outgoing = Outgoing("a", 1, "b")
        self.outcomes: Counter[str] = Counter()
        self._targets = (self._frame, self._frame, self._parcel, self._ack)

    def run(self, inputs: int) -> None:
        """Raises whatever is wrong, AssertionError among it."""
        for number in range(inputs):
            self._targets[number % 4]()

    def _changed(self, data: bytes) -> bytes:
        draw = self._draw
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            data = draw.choice(_CHANGES)(data, draw)
        return data if draw.random() > 0.02 else draw.randbytes(draw.randrange(60))

    # ---------------------------------------------------------------- the codec

    def _frame(self) -> None:
        data = self._changed(self._draw.choice(self._frames))
        assert lane_of_frame(data) in LANES
        try:
            found = decode(data)
        except MalformedFrame:
            self.outcomes["frames refused"] += 1
            return
        again = encode(found)
        assert encode(decode(again)) == again
        self.outcomes["frames read"] += 1

    # ---------------------------------------------------------------- the machines of a link

    def _parcel(self) -> None:
        draw = self._draw
        first = self._incoming.expected + draw.randrange(-3, 4)
        frames = [draw.choice(self._frames) for _ in range(draw.randrange(4))]
        session, receiver = draw.choice((self._incoming.session, 1)), draw.choice((OWN_SESSION, OWN_SESSION, 2))
        base = max(0, min(first, self._incoming.acknowledged))
        data = encode_parcel(Parcel("a", "b", max(0, session), receiver, 0, base, max(0, first), frames))
        try:
            parcel = decode_parcel(self._changed(data) if draw.random() < 0.9 else data)
        except MalformedParcel:
            self.outcomes["parcels refused"] += 1
            return
        self._take(parcel)
        self.outcomes["parcels read"] += 1
        if self._incoming.session > 1 or self._incoming.expected > 1 << 40:
            self._incoming = Incoming(OWN_SESSION)  # nothing sensible could come after that

    def _take(self, parcel: Parcel) -> None:
        incoming = self._incoming
        session, expected, dropped = incoming.session, incoming.expected, incoming.dropped
        new = incoming.take(parcel)
        assert incoming.dropped >= dropped
        assert incoming.session >= session
        assert len(new) <= len(parcel.frames)
        if incoming.session == session:
            assert incoming.expected >= expected + len(new)
        if new:
            assert incoming.expected == parcel.first + len(parcel.frames)
            incoming.acknowledge(incoming.session, incoming.expected - 1 - self._draw.randrange(3))
        ack = incoming.ack()
        assert decode_ack(encode_ack(ack)) == ack
        assert ack.acknowledged <= ack.received

    def _ack(self) -> None:
        draw, outgoing = self._draw, self._outgoing
        while outgoing.held < 4:
            outgoing.add(draw.choice(self._frames))
        received = outgoing.base + draw.randrange(5)
        acknowledged = draw.randrange(received + 1) if draw.random() < 0.5 else received
        data = encode_ack(Ack(1, draw.choice((0, 1)), received, acknowledged, 0, received + draw.randrange(-1, 2) + 1))
        try:
            ack = decode_ack(self._changed(data) if draw.random() < 0.9 else data)
        except MalformedParcel:
            self.outcomes["acknowledgements refused"] += 1
            return
        base, next_number = outgoing.base, outgoing.next
        heard = outgoing.hear(ack)
        assert base <= outgoing.base <= (ack.acknowledged if outgoing.base > base else base)
        assert outgoing.next == next_number
        parcel = outgoing.parcel()
        assert parcel is None or outgoing.base <= parcel.first <= outgoing.next
        self.outcomes["acknowledgements heard" if heard else "acknowledgements not heard"] += 1
        if ack.receiver > 1:
            self._outgoing = Outgoing("a", 1, "b")  # it would hear of no lower one again


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
