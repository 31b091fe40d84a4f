"""Packets of frames, which travel one way on a link, and acknowledgements, which travel the other
way.

A packet without frames is a probe: it asks which frames the receiver has.
"""

from typing import Annotated

import msgspec

MAX_FRAME_BYTES = 64 << 20  # longer frames are refused by the sender
MAX_PACKET_BYTES = MAX_FRAME_BYTES + (4 << 20)  # longer packets are dropped by the receiver
MAX_PACKET_FRAMES = 256
TARGET_PACKET_BYTES = 1 << 20  # a packet that has reached this size takes no further frame
UNKNOWN_EPOCH = -1

_Process = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_NextNumber = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 62) + (1 << 32))]  # after the last frame of a packet
_Epoch = Annotated[int, msgspec.Meta(ge=UNKNOWN_EPOCH, lt=1 << 62)]


class MalformedPacket(ValueError):
    """Bytes that are not a packet, or not an acknowledgement."""


class Packet(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    sender: _Process
    to: _Process  # intended receiver; another process may listen on its socket by now
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # of the sender
    receiver_epoch: _Epoch  # of the intended receiver; UNKNOWN_EPOCH only in a probe
    resend_round: _Number  # how often the sender has gone back to resend frames
    base: _Number  # lowest number that the sender still holds
    first: _Number  # number of the first frame; in a probe, of the next frame to be sent
    frames: list[bytes]


class Ack(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    epoch: _Epoch  # of the sender of the frames
    receiver_epoch: _Epoch  # of the sender of this acknowledgement
    received_below: _NextNumber  # all frames with lower numbers have arrived
    acknowledged_below: _NextNumber  # all frames with lower numbers are processed and need not be held
    resend_round: _Number  # of the packet that this answers
    sent_before: _Number  # frames with lower numbers were sent before that packet; 0 if this answers no packet


_encoder = msgspec.msgpack.Encoder()
_packet_decoder = msgspec.msgpack.Decoder(Packet)
_ack_decoder = msgspec.msgpack.Decoder(Ack)

encode_packet = encode_ack = _encoder.encode


def decode_packet(data: bytes) -> Packet:
    """Raises MalformedPacket."""
    if len(data) > MAX_PACKET_BYTES:
        raise MalformedPacket(f"{len(data)} bytes, more than the {MAX_PACKET_BYTES} allowed")
    try:
        return _packet_decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedPacket(str(error)) from error


def decode_ack(data: bytes) -> Ack:
    """Raises MalformedPacket."""
    try:
        return _ack_decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedPacket(str(error)) from error
