"""What travels on a link's wire: parcels of frames one way, acknowledgements the other way.

A parcel without frames is a question: how far has the receiver come?
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_FRAME_BYTES = 1 << 30  # a longer frame is not sent
MAX_PARCEL_BYTES = MAX_FRAME_BYTES + (4 << 20)  # a longer parcel is not taken
PARCEL_FRAMES = 256
PARCEL_BYTES = 1 << 20  # a parcel takes no further frame beyond it
UNKNOWN = -1  # stands for the session of a process that has not been heard of

_Process = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Reached = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 62) + (1 << 32))]  # after the last frame of a parcel
_Session = Annotated[int, msgspec.Meta(ge=UNKNOWN, lt=1 << 62)]


class MalformedParcel(ValueError):
    """Bytes that are no parcel, or no acknowledgement."""


class Parcel(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    sender: _Process
    to: _Process  # that is meant: where it listened, another one may listen now
    session: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # of the sender
    receiver: _Session  # the session of the receiver that is meant; frames travel to a known one alone
    turn: _Number  # how often the sender has gone back, to send again
    base: _Number  # the lowest number that the sender still holds
    first: _Number  # number of the first frame; of a question, that of the next frame that will be sent
    frames: list[bytes]


class Ack(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    session: _Session  # of the sender of the frames
    receiver: _Session  # of who says this
    received: _Reached  # all frames below it have arrived
    acknowledged: _Reached  # all frames below it are done with, and need not be held
    turn: _Number  # of the parcel that this answers
    asked: _Number  # what lies below it had been sent before that parcel; 0 if this answers none


_encoder = msgspec.msgpack.Encoder()
_parcels = msgspec.msgpack.Decoder(Parcel)
_acks = msgspec.msgpack.Decoder(Ack)

encode_parcel = encode_ack = _encoder.encode


def decode_parcel(data: bytes) -> Parcel:
    """Raises MalformedParcel."""
    if len(data) > MAX_PARCEL_BYTES:
        raise MalformedParcel(f"{len(data)} bytes, more than a parcel may have")
    try:
        return _parcels.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedParcel(str(error)) from error


def decode_ack(data: bytes) -> Ack:
    """Raises MalformedParcel."""
    try:
        return _acks.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedParcel(str(error)) from error
