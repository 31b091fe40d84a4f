"""Defines the file format of published weights, and the network requests for their chunks.

    offset 0          header: magic, policy version, bytes of the parameters, digest of the chunk table
    offset 64         chunk table: the XXH3-128 digest of each DIGEST_CHUNK_BYTES of the parameters
    body offset       the parameters (asterism.engine.weight_transfer.weight_layout), from a page boundary on

The header is invalid while the parameters are written. The digest identifies the weights: two versions with equal
parameters have equal digests, and a version that is trained again has another digest unless its bits are the same.

A node requests a chunk by slot, version, digest, offset and length. The answer repeats the request's frame, and adds a
frame with the bytes if the slot holds these weights.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from asterism.bus.messages import WeightsPublished

HEADER = struct.Struct("<8sqq16s")
MAGIC = b"asterism"
UNFINISHED_VERSION = -1  # replaces the version while a slot is written
DIGEST_CHUNK_BYTES = 16 * 2**20
_TABLE_OFFSET = 64
_DIGEST_BYTES = 16


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
    """Return whether the slot holds these weights, by its header and file size."""
    try:
        with slot.open("rb", buffering=0) as file:
            has_size = os.fstat(file.fileno()).st_size == compute_file_bytes(published.num_bytes)
            return has_size and parse_header(file.read(HEADER.size)) == build_header(published)
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------- sizes and digests


def count_digest_chunks(num_bytes: int) -> int:
    return -(-num_bytes // DIGEST_CHUNK_BYTES)


def get_body_offset(num_bytes: int) -> int:
    """Return the offset of `num_bytes` of parameters in their slot."""
    end = _TABLE_OFFSET + _DIGEST_BYTES * count_digest_chunks(num_bytes)
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def compute_file_bytes(num_bytes: int) -> int:
    return get_body_offset(num_bytes) + num_bytes


def get_chunk_table(slot: memoryview, num_bytes: int) -> memoryview:
    """Return the bytes of the chunk table in the content of a slot."""
    return slot[_TABLE_OFFSET : _TABLE_OFFSET + _DIGEST_BYTES * count_digest_chunks(num_bytes)]


def digest_chunk(slot: memoryview, num_bytes: int, number: int) -> bytes:
    """Return the digest of chunk `number` of the parameters in the content of a slot."""
    start = number * DIGEST_CHUNK_BYTES
    body = get_body_offset(num_bytes)
    return xxhash.xxh3_128_digest(slot[body + start : body + min(start + DIGEST_CHUNK_BYTES, num_bytes)])


def write_chunk_digest(slot: memoryview, num_bytes: int, number: int) -> None:
    digest = digest_chunk(slot, num_bytes, number)
    get_chunk_table(slot, num_bytes)[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)] = digest


def digest_table(table: memoryview | bytes, num_bytes: int) -> str:
    """Return the digest of the weights, from their chunk table."""
    return xxhash.xxh3_128_hexdigest(bytes(table) + num_bytes.to_bytes(8, "little"))


def has_chunk_digest(slot: memoryview, num_bytes: int, number: int) -> bool:
    """Return whether chunk `number` of the parameters matches the chunk table."""
    table = get_chunk_table(slot, num_bytes)
    return digest_chunk(slot, num_bytes, number) == bytes(table[_DIGEST_BYTES * number : _DIGEST_BYTES * (number + 1)])


def get_slot_path(folder: Path, number: int) -> Path:
    return folder / f"slot_{number}"


# ---------------------------------------------------------------- chunks

CHUNK_BYTES = 4 * 2**20
WINDOW_CHUNKS = 3  # outstanding requests of one node
MAX_REQUEST_BYTES = 4096  # CURVE's handshake messages have 500 bytes

_NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class ChunkRequest(msgspec.Struct, frozen=True, array_like=True):
    slot: _NonNegativeInt
    version: _NonNegativeInt
    digest: str
    offset: _NonNegativeInt  # offset from the first byte of the parameters
    length: Annotated[int, msgspec.Meta(ge=1, le=CHUNK_BYTES)]


encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ChunkRequest).decode


def read_chunk(folder: Path, request: ChunkRequest) -> bytes | None:
    """Read a chunk; None if the slot does not hold these weights, or ends before the chunk does. Raises OSError."""
    try:
        with get_slot_path(folder, request.slot).open("rb", buffering=0) as file:
            slot = file.fileno()
            before = parse_header(os.pread(slot, HEADER.size, 0))
            if before is None or (before.version, before.digest) != (request.version, request.digest):
                return None
            chunk = os.pread(slot, request.length, get_body_offset(before.num_bytes) + request.offset)
            after = parse_header(os.pread(slot, HEADER.size, 0))
    except FileNotFoundError:
        return None
    return chunk if before == after and len(chunk) == request.length else None
