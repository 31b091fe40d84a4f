"""Envelopes to bytes and back. The bytes are what travels and what is logged."""

from __future__ import annotations

import msgspec

from bus.messages import AnyMessage, Envelope


class MalformedFrame(ValueError):
    """Bytes that are no Envelope of this protocol."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(frame: bytes) -> Envelope:
    """Raises MalformedFrame."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # also text that is none, or what lies too deep
        raise MalformedFrame(str(error)) from error


def head_of(kind: type[AnyMessage]) -> bytes:
    """The bytes with which every message of a kind begins: an array of the tag and the fields, in MessagePack."""
    tag, length = kind.__name__.encode(), 1 + len(kind.__struct_fields__)
    assert len(tag) < 32, f"{kind.__name__} has no short head"
    array = bytes((0x90 + length,)) if length < 16 else b"\xdc" + length.to_bytes(2, "big")
    return array + bytes((0xA0 + len(tag),)) + tag


def begins_with(frame: bytes, heads: tuple[bytes, ...]) -> bool:
    """Whether the message of an encoded Envelope has one of the heads: as much as can be known without decoding it."""
    at = 1
    for _ in range(2):  # sender and receiver, as strings of up to 31 or 255 bytes
        first = frame[at] if at < len(frame) else 0
        if 0xA0 <= first <= 0xBF:
            at += 1 + (first & 0x1F)
        elif first == 0xD9 and at + 1 < len(frame):
            at += 2 + frame[at + 1]
        else:
            return False
    return frame.startswith(heads, at)
