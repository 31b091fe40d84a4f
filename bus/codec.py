"""Envelopes to bytes and back. The bytes are what travels and what is logged."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bus.messages import AnyMessage, Batch, Envelope


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
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MalformedFrame(str(error)) from error


# ---------------------------------------------------------------- batches

_BATCH_HEAD = _encoder.encode(Envelope("", "", Batch(())))[:-1]  # all but the number of envelopes


def encode_batch(frames: Sequence[bytes]) -> bytes:
    return _encoder.encode(Envelope("", "", Batch(tuple(msgspec.Raw(frame) for frame in frames))))


def split(frame: bytes) -> Sequence[bytes]:
    """The frames of a batch, each as it was sent; any other frame is its own only one."""
    if not frame.startswith(_BATCH_HEAD):
        return (frame,)
    try:
        message = decode(frame).message
    except MalformedFrame:
        return (frame,)  # whoever receives it finds out
    return [bytes(envelope) for envelope in message.envelopes] if isinstance(message, Batch) else (frame,)


def head_of(kind: type[AnyMessage]) -> bytes:
    """The bytes with which every message of a kind begins: an array of the tag and the fields, in MessagePack."""
    tag, num_fields = kind.__name__.encode(), len(kind.__struct_fields__)
    assert num_fields < 15 and len(tag) < 32, f"{kind.__name__} has no short head"
    return bytes((0x91 + num_fields, 0xA0 + len(tag))) + tag


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
