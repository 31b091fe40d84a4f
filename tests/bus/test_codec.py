"""Tests: the codec restores every kind of message and refuses malformed frames."""

import random

import pytest

from asterism.bus.codec import MalformedFrame, decode, encode
from asterism.bus.messages import AnyMessage, Envelope, LeaseReleased, Shutdown
from asterism.bus.transport.packets import MalformedPacket, decode_ack, decode_packet
from tests.bus.fuzz import Fuzzer
from tests.bus.samples import KINDS, envelope

FRAME = encode(Envelope("a", "b", Shutdown()))
EXTENDED = b"\x94" + FRAME[1:]  # one element too many


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_message_is_restored_from_its_encoding(kind: type[AnyMessage]) -> None:
    draw = random.Random(3)
    for _ in range(20):
        sent = envelope(kind, draw)
        assert decode(encode(sent)) == sent
        assert type(sent.message) is kind


@pytest.mark.parametrize(
    "frame",
    [
        *(b"", FRAME[:-1], FRAME + b"\x00", b"\xc1", b"\x93\xa1a\xa1b\x91\xa7Unknown"),
        *(b"\x93\xa1a\xa1b\xdd\xff\xff\xff\xff", b"\x93\xa1a\xc6\xff\xff\xff\xff"),  # wrong lengths
        *(EXTENDED + b"\x91" * 100_000 + b"\xc0", EXTENDED + b"\x81\xc0" * 100_000 + b"\xc0"),  # nested too deeply
        *(b"\x93\xa1\xff" + FRAME[3:], b"\x93\xa3\xed\xa0\x80" + FRAME[3:]),  # invalid UTF-8
        encode(Envelope("a", "b", LeaseReleased(1, 5)))[:-1] + b"\xcb\x3f\xf8\0\0\0\0\0\0",  # a fraction of a token
    ],
)
def test_invalid_bytes_are_refused_as_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode(frame)
    with pytest.raises(MalformedPacket):
        decode_packet(frame)
    with pytest.raises(MalformedPacket):
        decode_ack(frame)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_randomly_damaged_frames_and_packets_are_decoded_or_refused(seed: int) -> None:
    """Ten thousand inputs are tested here, and a million by `make fuzz`."""
    fuzzer = Fuzzer(seed)
    fuzzer.run(10_000)
    assert min(fuzzer.outcomes.values()) > 100
    assert len(fuzzer.outcomes) == 7
