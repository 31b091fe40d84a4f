"""The file in which one version of the weights lies: a header, then all parameters as float32, by their sorted names.

The header says whose bytes follow only while they are all there: it is made invalid before they are written. So who
finds the same header before and after he reads, has read these bytes and no others.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from bus.messages import WeightsPublished

HEADER = struct.Struct("<8sqq16s")  # magic, policy version, bytes of parameters, their digest
HEADER_BYTES = 64  # keeps the parameters aligned
MAGIC = b"asterism"
UNFINISHED = -1  # in place of the version while a slot is written


class SlotHeader(NamedTuple):
    version: int
    num_bytes: int
    digest: str

    def packed(self) -> bytes:
        return HEADER.pack(MAGIC, self.version, self.num_bytes, bytes.fromhex(self.digest))


def header_of(published: WeightsPublished) -> SlotHeader:
    return SlotHeader(published.version, published.num_bytes, published.digest)


def read_header(content: bytes | memoryview) -> SlotHeader | None:
    """From the beginning of a slot; None if it is none."""
    if len(content) < HEADER.size:
        return None
    magic, version, num_bytes, digest = HEADER.unpack_from(content)
    return SlotHeader(version, num_bytes, digest.hex()) if magic == MAGIC else None


def holds(slot: Path, published: WeightsPublished) -> bool:
    """Whether these weights lie there, by the header and the file's size."""
    try:
        with slot.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            return size == HEADER_BYTES + published.num_bytes and read_header(file.read(HEADER.size)) == header_of(
                published
            )
    except FileNotFoundError:
        return False


def slot_path(folder: Path, number: int) -> Path:
    return folder / f"slot_{number}"


def number_of(slot: Path) -> int:
    """The inverse of slot_path. Raises ValueError."""
    return int(slot.name.removeprefix("slot_"))
