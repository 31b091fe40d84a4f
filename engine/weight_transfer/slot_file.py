"""The file format of published weights, and the requests for chunks of it over the network.

A slot is a header, then all parameters as float32, sorted by name. The header is invalid while the parameters are
written. So a reader that finds the same header before and after a read has read bytes of that version only.

A node requests a chunk by slot, version, digest, offset and length. The answer is the request's frame, then a frame with
the bytes if the slot holds these weights.
"""

import os
import struct
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from bus.messages import WeightsPublished

HEADER = struct.Struct("<8sqq16s")  # magic, policy version, bytes of parameters, their digest
HEADER_BYTES = 64  # keeps the parameters aligned
MAGIC = b"asterism"
UNFINISHED_VERSION = -1  # in place of the version while a slot is written


class SlotHeader(NamedTuple):
    version: int
    num_bytes: int
    digest: str

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, self.version, self.num_bytes, bytes.fromhex(self.digest))


def build_header(published: WeightsPublished) -> SlotHeader:
    return SlotHeader(published.version, published.num_bytes, published.digest)


def parse_header(content: bytes | memoryview) -> SlotHeader | None:
    """Parse the first bytes of a slot; None if they are not a header."""
    if len(content) < HEADER.size:
        return None
    magic, version, num_bytes, digest = HEADER.unpack_from(content)
    return SlotHeader(version, num_bytes, digest.hex()) if magic == MAGIC else None


def has_weights(slot: Path, published: WeightsPublished) -> bool:
    """Whether the slot holds these weights, by its header and file size."""
    try:
        with slot.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return size == HEADER_BYTES + published.num_bytes and parse_header(file.read(HEADER.size)) == build_header(
                published
            )
    except FileNotFoundError:
        return False


def get_slot_path(folder: Path, number: int) -> Path:
    return folder / f"slot_{number}"


# ---------------------------------------------------------------- chunks

CHUNK_BYTES = 4 * 2**20
WINDOW_CHUNKS = 3  # outstanding requests of one node
MAX_REQUEST_BYTES = 4096  # CURVE's handshake messages have 500

_NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class ChunkRequest(msgspec.Struct, frozen=True, array_like=True):
    slot: _NonNegativeInt
    version: _NonNegativeInt
    digest: str
    offset: _NonNegativeInt  # from the first byte of the parameters
    length: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES)]


encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ChunkRequest).decode


def read_chunk(folder: Path, request: ChunkRequest) -> bytes | None:
    """None if the slot does not hold these weights, or ends before the chunk does. Raises OSError."""
    try:
        with get_slot_path(folder, request.slot).open("rb", buffering=0) as file:
            slot = file.fileno()
            before = parse_header(os.pread(slot, HEADER.size, 0))
            if before is None or (before.version, before.digest) != (request.version, request.digest):
                return None
            chunk = os.pread(slot, request.length, HEADER_BYTES + request.offset)
            after = parse_header(os.pread(slot, HEADER.size, 0))
    except FileNotFoundError:
        return None
    return chunk if before == after and len(chunk) == request.length else None
