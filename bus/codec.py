"""Envelopes to bytes and back. The bytes are what travels and what is logged."""

from __future__ import annotations

import msgspec

from bus.messages import Envelope


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
