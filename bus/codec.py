"""Encoding of envelopes as frames, which are sent and logged."""

import msgspec

from asterism.bus.messages import AnyMessage, Envelope


class MalformedFrame(ValueError):
    """An error for bytes that are not a valid Envelope."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode(frame: bytes) -> Envelope:
    """Return the envelope. Raises MalformedFrame."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # includes invalid UTF-8 and too deep nesting
        raise MalformedFrame(str(error)) from error


def build_kind_prefix(kind: type[AnyMessage]) -> bytes:
    """Return the first bytes of every message of a kind: header of the MessagePack array, and the tag."""
    tag, length = kind.__name__.encode(), 1 + len(kind.__struct_fields__)
    assert len(tag) < 32, f"the name {kind.__name__} is too long for a short header"
    array = bytes((0x90 + length,)) if length < 16 else b"\xdc" + length.to_bytes(2, "big")
    return array + bytes((0xA0 + len(tag),)) + tag


def has_kind_prefix(frame: bytes, prefixes: tuple[bytes, ...]) -> bool:
    """Return whether the message of an encoded Envelope starts with a prefix, without decoding it."""
    at = 1
    for _ in range(2):  # sender and receiver, as strings of up to 31 or 255 bytes
        first = frame[at] if at < len(frame) else 0
        if 0xA0 <= first <= 0xBF:
            at += 1 + (first & 0x1F)
        elif first == 0xD9 and at + 1 < len(frame):
            at += 2 + frame[at + 1]
        else:
            return False
    return frame.startswith(prefixes, at)
