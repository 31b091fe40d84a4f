"""Encoding of frames in an event log: plain, or compressed if this makes the frame shorter. The first byte is a marker.

Elements of token arrays have four bytes, and their bytes at equal places are similar: high bytes of ids,
exponents of logprobs, all bytes of versions. A byte shuffle therefore groups every fourth byte
before DEFLATE. On the long frames of a simulated step (docs/replay.md), level 1 reduces the bytes to
0.35, or to 0.39 without the shuffle. Level 6 reaches 0.33 and takes a third more time; higher levels
cost more than they save.
"""

import zlib

from asterism.bus.transport.packets import MAX_FRAME_BYTES

MIN_COMPRESSED_BYTES = 512  # shorter frames stay plain: compression saves little and takes time
_PLAIN, _DEFLATED, _SHUFFLED = b"\x00", b"\x01", b"\x02"
_LEVEL = 1
_ZERO_BYTE_RATIO = 8  # a frame contains arrays if more than 1/8 of its bytes are zero; text has no zero bytes


def compress_frame(frame: bytes) -> bytes:
    """Return the stored frame, at most one byte longer. A frame above MAX_FRAME_BYTES stays plain."""
    if not MIN_COMPRESSED_BYTES <= len(frame) <= MAX_FRAME_BYTES:
        return store_uncompressed(frame)
    if frame.count(0) * _ZERO_BYTE_RATIO > len(frame):
        packed = _SHUFFLED + zlib.compress(b"".join(frame[offset::4] for offset in range(4)), _LEVEL)
    else:
        packed = _DEFLATED + zlib.compress(frame, _LEVEL)
    return packed if len(packed) < len(frame) else store_uncompressed(frame)


def store_uncompressed(frame: bytes) -> bytes:
    """Return the frame, with a marker only if its first byte equals a marker."""
    return _PLAIN + frame if frame[:1] in (_PLAIN, _DEFLATED, _SHUFFLED) else frame


def decompress_frame(stored: bytes) -> bytes:
    """Return the frame. Raises zlib.error for damaged data, and for a frame that expands beyond MAX_FRAME_BYTES."""
    marker = stored[:1]
    if marker == _PLAIN:
        return stored[1:]
    if marker == _DEFLATED:
        return _decompress(stored)
    if marker != _SHUFFLED:
        return stored
    planes = _decompress(stored)
    frame = bytearray(len(planes))
    start = 0
    for offset in range(4):
        length = len(frame[offset::4])
        frame[offset::4] = planes[start : start + length]
        start += length
    return bytes(frame)


def _decompress(stored: bytes) -> bytes:
    decoder = zlib.decompressobj()
    frame = decoder.decompress(memoryview(stored)[1:], MAX_FRAME_BYTES + 1)
    if len(frame) > MAX_FRAME_BYTES:
        raise zlib.error(f"the frame expands to more than {MAX_FRAME_BYTES:,} bytes")
    if not decoder.eof or decoder.unused_data:
        raise zlib.error("the frame is incomplete, or has further data")
    return frame
