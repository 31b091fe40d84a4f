"""Files of accepted groups: each trajectory is stored once, and a rank reads only its own ones.

A file is the length of its index (uint64), the index, and the tokens of each trajectory: token ids (int32), log
probabilities (float32) and loss mask (uint8), all little-endian. Tokens after the last one in the loss are left out.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from bus.messages import GroupAccepted
from configs.atomic_write import write_atomically
from engine.learner.training_sequence import TrainingSequence, build_rl_sequence

BYTES_PER_TOKEN = 9
_LENGTH = struct.Struct("<Q")


class SampleEntry(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory in a file."""

    trajectory_id: int
    group_id: int
    advantage: float
    num_tokens: int  # T, prompt included
    num_loss_tokens: int
    token_id_range: tuple[int, int]  # lowest and highest; (0, 0) without tokens
    start: int  # of its tokens, from the first byte after the index

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_TOKEN * self.num_tokens


_encode_index = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(tuple[SampleEntry, ...]).decode


def write_samples(path: Path, group: GroupAccepted) -> None:
    """Raises DiskError, and ValueError, which names the trajectory, for arrays of different lengths."""
    entries, parts, start = list[SampleEntry](), list[bytes](), 0
    for sample in group.samples:
        sequence = build_rl_sequence(sample)
        entry = SampleEntry(
            sample.trajectory_id,
            sample.group_id,
            sample.advantage,
            sequence.num_tokens,
            sequence.num_loss_tokens,
            sequence.token_id_range,
            start,
        )
        entries.append(entry)
        parts += [sequence.token_ids.tobytes(), sequence.logprobs.tobytes(), sequence.loss_mask.tobytes()]
        start += entry.num_bytes
    index = _encode_index(entries)
    write_atomically(path, b"".join([_LENGTH.pack(len(index)), index, *parts]))


class StoredSequence(NamedTuple):
    """A trajectory of a batch."""

    entry: SampleEntry
    path: Path  # on the leading rank's node
    position: int  # of its tokens in the file
    content: memoryview | None = None  # its tokens, if the file is on another node

    @property
    def trajectory_id(self) -> int:
        return self.entry.trajectory_id

    @property
    def group_id(self) -> int:
        return self.entry.group_id

    @property
    def num_tokens(self) -> int:
        return self.entry.num_tokens

    @property
    def num_loss_tokens(self) -> int:
        return self.entry.num_loss_tokens

    @property
    def token_id_range(self) -> tuple[int, int]:
        return self.entry.token_id_range

    def read_bytes(self) -> bytes:
        """Raises OSError, and ValueError for a file that is too short."""
        with self.path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), self.entry.num_bytes, self.position)
        if len(content) != self.entry.num_bytes:
            raise ValueError(f"{self.path}: the tokens of trajectory {self.trajectory_id} are incomplete")
        return content

    def load(self) -> TrainingSequence:
        """Raises as read_bytes does."""
        content, count = self.read_bytes() if self.content is None else self.content, self.num_tokens
        return TrainingSequence(
            np.frombuffer(content, "<i4", count),
            np.frombuffer(content, np.bool_, count, 8 * count),
            np.frombuffer(content, "<f4", count, 4 * count),
            self.entry.advantage,
            self.group_id,
            self.trajectory_id,
        )


class SampleIndex(NamedTuple):
    """The index of a file, encoded: the ranks get it in this form, because pickling many objects blocks an event loop."""

    path: str
    content: bytes


def read_index(path: Path) -> SampleIndex:
    """Reads no tokens. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        return SampleIndex(str(path), file.read(length))


def list_sequences(indexes: Iterable[SampleIndex]) -> list[StoredSequence]:
    """In the order of the files."""
    return [
        StoredSequence(entry, path, _LENGTH.size + len(index.content) + entry.start)
        for index, path in ((index, Path(index.path)) for index in indexes)
        for entry in _decode_index(index.content)
    ]


def count_bytes(sequences: Sequence[StoredSequence]) -> int:
    return sum(sequence.entry.num_bytes for sequence in sequences)
