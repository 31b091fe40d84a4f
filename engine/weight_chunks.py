"""What a node asks the weights' server for: a chunk of a slot, by its place and by whose bytes it has to be.

An answer is the question's frame again and, if the slot holds these weights, a frame with the bytes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from engine.weight_slots import HEADER, HEADER_BYTES, read_header, slot_path

CHUNK_BYTES = 4 * 2**20
WINDOW_CHUNKS = 3  # asked for at once by one node
QUESTION_BYTES = 4096  # at most; CURVE's greetings have 500

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class ChunkWanted(msgspec.Struct, frozen=True, array_like=True):
    slot: _Count
    version: _Count
    digest: str
    offset: _Count  # in the parameters' bytes
    length: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES)]


encode_question = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(ChunkWanted).decode


def read_chunk(folder: Path, wanted: ChunkWanted) -> bytes | None:
    """None if the slot does not hold these weights, or not so many bytes there. Raises OSError if it cannot be read."""
    try:
        with slot_path(folder, wanted.slot).open("rb", buffering=0) as file:
            slot = file.fileno()
            before = read_header(os.pread(slot, HEADER.size, 0))
            if before is None or (before.version, before.digest) != (wanted.version, wanted.digest):
                return None
            chunk = os.pread(slot, wanted.length, HEADER_BYTES + wanted.offset)
            after = read_header(os.pread(slot, HEADER.size, 0))
    except FileNotFoundError:
        return None
    return chunk if before == after and len(chunk) == wanted.length else None
