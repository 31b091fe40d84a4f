"""Packets of frames, and acknowledgements, which travel in the opposite direction of a link.

A packet without frames is a probe: it requests a report of the frames that the receiver has.
"""

from typing import Annotated, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 << 20  # the sender refuses longer frames
MAX_PACKET_BYTES = MAX_FRAME_BYTES + (4 << 20)  # the receiver drops longer packets
MAX_PACKET_FRAMES = 256
TARGET_PACKET_BYTES = 1 << 20  # a packet of this size or more gets no further frame
UNKNOWN_EPOCH = -1

_Process = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_NextNumber = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 62) + (1 << 32))]  # number after the last frame of a packet
_Epoch = Annotated[int, msgspec.Meta(ge=UNKNOWN_EPOCH, lt=1 << 62)]


class MalformedPacket(ValueError):
    """An error for bytes that are not a packet, or not an acknowledgement."""


class Packet(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    sender: _Process
    to: _Process  # intended receiver; another process can listen on its socket now
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # epoch of the sender
    receiver_epoch: _Epoch  # epoch of the intended receiver; UNKNOWN_EPOCH only in a probe
    resend_round: _Number  # number of times that the sender has gone back to resend frames
    base: _Number  # lowest number that the sender still holds
    first: _Number  # number of the first frame; in a probe, of the next frame to be sent
    frames: list[bytes]


class Ack(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    epoch: _Epoch  # epoch of the sender of the frames
    receiver_epoch: _Epoch  # epoch of the sender of this acknowledgement
    received_below: _NextNumber  # all frames with lower numbers have arrived
    acknowledged_below: _NextNumber  # all frames with lower numbers are processed; the sender can drop them
    resend_round: _Number  # round of the packet that this acknowledgement answers
    sent_before: _Number  # frames with lower numbers were sent before the answered packet; 0 without such a packet


PacketT = TypeVar("PacketT", Packet, Ack)
_encoder = msgspec.msgpack.Encoder()
_packet_decoder = msgspec.msgpack.Decoder(Packet)
_ack_decoder = msgspec.msgpack.Decoder(Ack)

encode_packet = encode_ack = _encoder.encode


def decode_packet(data: bytes) -> Packet:
    """Return the packet. Raises MalformedPacket."""
    if len(data) > MAX_PACKET_BYTES:
        raise MalformedPacket(f"{len(data)} bytes, more than the {MAX_PACKET_BYTES} allowed")
    return _decode(_packet_decoder, data)


def decode_ack(data: bytes) -> Ack:
    """Return the acknowledgement. Raises MalformedPacket."""
    return _decode(_ack_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[PacketT], data: bytes) -> PacketT:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedPacket(str(error)) from error
