"""Files of accepted groups: each trajectory is stored once, and a rank reads only its own trajectories.

A file contains the length of its index (uint64), the index, and the tokens of each trajectory: token ids (int32), log
probabilities (float32) and loss mask (uint8), all little-endian. Tokens after the last loss token are left out.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from asterism.bus.messages import GroupAccepted
from asterism.configs.atomic_write import write_atomically
from asterism.engine.learner.batches.training_sequence import Prompt, TrainingSequence, build_rl_sequence

BYTES_PER_TOKEN = 9
_LENGTH = struct.Struct("<Q")


class SampleEntry(NamedTuple):
    """The entry of one trajectory in the index of a file."""

    trajectory_id: int
    group_id: int
    advantage: float
    num_tokens: int  # number of tokens (T), including the prompt
    num_loss_tokens: int
    token_id_range: tuple[int, int]  # lowest and highest token id; (0, 0) without tokens
    prompt: Prompt


_encode_index = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(list[SampleEntry]).decode


def write_samples(path: Path, group: GroupAccepted) -> None:
    """Write a file. Raises DiskError, and ValueError with the trajectory for arrays of different lengths."""
    sequences = [build_rl_sequence(sample) for sample in group.samples]
    index = _encode_index([_describe(sequence) for sequence in sequences])
    columns = ((each.token_ids, each.logprobs, each.loss_mask) for each in sequences)
    parts = [column.tobytes() for of_sequence in columns for column in of_sequence]
    write_atomically(path, b"".join([_LENGTH.pack(len(index)), index, *parts]))


def _describe(sequence: TrainingSequence) -> SampleEntry:
    return SampleEntry(
        sequence.trajectory_id,
        sequence.group_id,
        sequence.advantage,
        sequence.num_tokens,
        sequence.num_loss_tokens,
        sequence.token_id_range,
        sequence.prompt,
    )


class StoredSequence(NamedTuple):
    """A trajectory of a batch. Its first fields equal the fields of SampleEntry."""

    trajectory_id: int
    group_id: int
    advantage: float
    num_tokens: int
    num_loss_tokens: int
    token_id_range: tuple[int, int]
    prompt: Prompt
    path: Path  # file on the leading rank's node
    position: int  # offset of the tokens in the file, in bytes
    content: memoryview | None = None  # the tokens, if the file is on another node

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_TOKEN * self.num_tokens

    def read_bytes(self) -> bytes:
        """Read the tokens. Raises OSError, and ValueError for a file that is too short."""
        with self.path.open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), self.num_bytes, self.position)
        if len(content) != self.num_bytes:
            raise ValueError(f"{self.path}: the tokens of trajectory {self.trajectory_id} are incomplete")
        return content

    def load(self) -> TrainingSequence:
        """Load the sequence. Raises the errors of read_bytes."""
        content, count = self.read_bytes() if self.content is None else self.content, self.num_tokens
        return TrainingSequence(
            np.frombuffer(content, "<i4", count),
            np.frombuffer(content, np.bool_, count, 8 * count),
            np.frombuffer(content, "<f4", count, 4 * count),
            self.advantage,
            self.group_id,
            self.trajectory_id,
        )


class SampleIndex(NamedTuple):
    """The encoded index of a file, which ranks receive in this form."""

    path: str
    content: bytes


def read_index(path: Path) -> SampleIndex:
    """Read the index without the tokens. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        return SampleIndex(str(path), file.read(length))


def list_sequences(indexes: Iterable[SampleIndex]) -> list[StoredSequence]:
    """Return the sequences in the order of the files."""
    sequences: list[StoredSequence] = []
    for index in indexes:
        path, position = Path(index.path), _LENGTH.size + len(index.content)
        for entry in _decode_index(index.content):
            sequences.append(StoredSequence(*entry, path, position))
            position += sequences[-1].num_bytes
    return sequences


def count_bytes(sequences: Sequence[StoredSequence]) -> int:
    return sum(sequence.num_bytes for sequence in sequences)
