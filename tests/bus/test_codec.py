"""The codec: every kind there and back, and whatever else comes is refused in one way."""

from __future__ import annotations

import random

import pytest

from bus.codec import MalformedFrame, decode, encode
from bus.messages import AnyMessage, Envelope, LeaseReleased, Shutdown, TurnGenerated
from bus.parcels import MalformedParcel, decode_ack, decode_parcel
from tests.bus.fuzz import Fuzzer
from tests.bus.samples import KINDS, envelope

FRAME = encode(Envelope("a", "b", Shutdown()))
MORE = b"\x94" + FRAME[1:]  # one element more than there should be


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_read_as_it_was_written(kind: type[AnyMessage]) -> None:
    draw = random.Random(3)
    for _ in range(20):
        sent = envelope(kind, draw)
        assert decode(encode(sent)) == sent
        assert type(sent.message) is kind


@pytest.mark.parametrize(
    "frame",
    [
        *(b"", FRAME[:-1], FRAME + b"\x00", b"\xc1", b"\x93\xa1a\xa1b\x91\xa7Unknown"),
        *(b"\x93\xa1a\xa1b\xdd\xff\xff\xff\xff", b"\x93\xa1a\xc6\xff\xff\xff\xff"),  # lengths that are not there
        *(MORE + b"\x91" * 100_000 + b"\xc0", MORE + b"\x81\xc0" * 100_000 + b"\xc0"),  # deeper than anything is
        *(b"\x93\xa1\xff" + FRAME[3:], b"\x93\xa3\xed\xa0\x80" + FRAME[3:]),  # no text
        encode(Envelope("a", "b", LeaseReleased(1, 5)))[:-1] + b"\xcb\x3f\xf8\0\0\0\0\0\0",  # 1.5 tokens
    ],
)
def test_what_is_not_of_this_protocol_is_malformed_and_nothing_else(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode(frame)
    with pytest.raises(MalformedParcel):
        decode_parcel(frame)
    with pytest.raises(MalformedParcel):
        decode_ack(frame)


def test_the_codec_keeps_bytes_and_text() -> None:
    sent = Envelope("a", "b", TurnGenerated(1, 0, 1, b"\x00\xff", b"", b"", "stop"))
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_frames_and_parcels_that_were_changed_at_random_do_no_harm(seed: int) -> None:
    """`make fuzz` tries a million."""
    fuzzer = Fuzzer(seed)
    fuzzer.run(10_000)
    assert min(fuzzer.outcomes.values()) > 100
    assert len(fuzzer.outcomes) == 7
