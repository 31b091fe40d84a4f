"""What travels between the executor and its fork servers and grader: JSON objects behind a length of four bytes.

Standard library only. The executed code never holds such a socket: fork servers write these frames, and nobody else.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

Frame = dict[str, Any]
LENGTH = struct.Struct("<I")
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each frame
_decode = json.JSONDecoder().decode
FRAME_LIMIT = 64 * 1024 * 1024  # bytes; a longer one is a broken peer


class BrokenStream(Exception):
    """The peer sent what is no frame."""


def encode(frame: Frame) -> bytes:
    body = _encode(frame).encode("ascii")
    return LENGTH.pack(len(body)) + body


def _decode_body(body: bytearray) -> Any:
    return _decode(body.decode())


class FrameReader:
    """Cuts a byte stream into frames. `decode` raises ValueError or RecursionError for what is no JSON."""

    def __init__(self, decode: Callable[[bytearray], Any] = _decode_body) -> None:
        self._decode = decode
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[Frame]:
        """All frames that are complete now. Raises BrokenStream."""
        self._buffer += chunk
        frames: list[Frame] = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer, start)
            if length > FRAME_LIMIT:
                raise BrokenStream(f"a frame of {length} bytes")
            end = start + LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(self._object(self._buffer[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames

    def _object(self, body: bytearray) -> Frame:
        try:
            value = self._decode(body)
        except (ValueError, RecursionError) as error:
            raise BrokenStream("a frame that is not JSON") from error
        if not isinstance(value, dict):
            raise BrokenStream("a frame that is not an object")
        return value  # pyright: ignore[reportUnknownVariableType]
