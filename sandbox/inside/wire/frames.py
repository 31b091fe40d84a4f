"""Frames of the executor, fork servers and grader: a four-byte length, then a JSON object.

Executed code never has such a socket: only trusted processes write frames.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

Frame = dict[str, Any]
LENGTH = struct.Struct("<I")
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps makes an encoder per frame
_decode = json.JSONDecoder().decode
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a longer frame is a protocol error


class BrokenStream(Exception):
    """The error for an invalid frame of the peer."""


def encode_frame(frame: Frame) -> bytes:
    body = _encode(frame).encode("ascii")
    return LENGTH.pack(len(body)) + body


def _decode_body(body: bytearray) -> Any:
    return _decode(body.decode())


class FrameReader:
    """Splits a byte stream into frames. `decode` raises ValueError or RecursionError."""

    def __init__(self, decode: Callable[[bytearray], Any] = _decode_body) -> None:
        self._decode = decode
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Frame]:
        """Return the frames that this chunk completes. Raises BrokenStream."""
        self._buffer += chunk
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise BrokenStream(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are allowed")
            end = start + LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(self._decode_object(self._buffer[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames

    def _decode_object(self, body: bytearray) -> Frame:
        try:
            value = self._decode(body)
        except (ValueError, RecursionError) as error:
            raise BrokenStream("a frame that is not JSON") from error
        if not isinstance(value, dict):
            raise BrokenStream("a frame that is not an object")
        return value  # pyright: ignore[reportUnknownVariableType]
