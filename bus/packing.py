"""How frames lie in an event log: as they arrived, or packed where that is smaller. The first byte tells which.

Token arrays are four bytes an element, and elements resemble each other byte by byte: the high bytes of ids, the
exponents of logprobs, all of versions. So every fourth byte is put side by side before DEFLATE sees them. Of the long frames
of a simulated step (benchmarks/_event_log.py) level 1 then leaves 0.35 of the bytes, and 0.39 without it; level 6 leaves
0.33 for a third more time, and each further one costs more than it brings.
"""

from __future__ import annotations

import zlib

LEAST_BYTES = 512  # smaller frames stay as they are: there is little to gain, and many of them
_PLAIN, _DEFLATED, _PLANES = b"\x00", b"\x01", b"\x02"
_LEVEL = 1
_ZEROS = 8  # a frame of which more than one byte in so many is 0 holds arrays: text has none


def pack(frame: bytes) -> bytes:
    """Never longer than the frame and a byte."""
    if len(frame) < LEAST_BYTES:
        return plain(frame)
    if frame.count(0) * _ZEROS > len(frame):
        packed = _PLANES + zlib.compress(b"".join(frame[place::4] for place in range(4)), _LEVEL)
    else:
        packed = _DEFLATED + zlib.compress(frame, _LEVEL)
    return packed if len(packed) < len(frame) else plain(frame)


def plain(frame: bytes) -> bytes:
    """As it is; where its own first byte could be taken for a mark, behind one."""
    return _PLAIN + frame if frame[:1] in (_PLAIN, _DEFLATED, _PLANES) else frame


def unpack(stored: bytes) -> bytes:
    """The frame again. Raises zlib.error where it is damaged."""
    mark = stored[:1]
    if mark == _PLAIN:
        return stored[1:]
    if mark == _DEFLATED:
        return zlib.decompress(stored[1:])
    if mark != _PLANES:
        return stored
    planes = zlib.decompress(stored[1:])
    frame = bytearray(len(planes))
    start = 0
    for place in range(4):
        length = len(frame[place::4])
        frame[place::4] = planes[start : start + length]
        start += length
    return bytes(frame)
