"""Sends samples to ranks on other nodes, because only the leading rank's node has the sample files.

Each rank of that node sends samples to the ranks that have the same local rank on other nodes.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asterism.engine.learner.batches.sample_files import StoredSequence, count_bytes
from asterism.engine.learner.batches.training_sequence import RankShares
from asterism.engine.learner.distributed import RankGroup

PIECE_BYTES = 64 << 20  # size of one transfer

DealtMinibatch = tuple[Sequence[StoredSequence], RankShares]


def exchange_samples(ranks: RankGroup, minibatches: Sequence[DealtMinibatch]) -> list[list[StoredSequence]]:
    """Return the minibatches, with the samples of this rank in memory if their files are on another node.

    Every rank calls it with equal minibatches.
    """
    with ranks.operation("exchange of samples"):
        return _exchange(ranks, minibatches)


def _exchange(ranks: RankGroup, minibatches: Sequence[DealtMinibatch]) -> list[list[StoredSequence]]:
    if ranks.node == 0:
        for rank in range(ranks.rank + ranks.local_world_size, ranks.world_size, ranks.local_world_size):
            for piece in _iter_pieces(_list_share(ranks, minibatches, rank)):
                dist.send(piece, rank)
        return [list(sequences) for sequences, _ in minibatches]
    received = _receive(_list_share(ranks, minibatches, ranks.rank), ranks.rank % ranks.local_world_size)
    return [[received.get(each.trajectory_id, each) for each in sequences] for sequences, _ in minibatches]


def _list_share(ranks: RankGroup, minibatches: Sequence[DealtMinibatch], rank: int) -> list[StoredSequence]:
    return [
        sequences[index]
        for sequences, shares in minibatches
        for micro_batch in shares[ranks.find_data_rank(rank)]
        for index in micro_batch
    ]


def _iter_pieces(sequences: Sequence[StoredSequence]) -> Iterator[Tensor]:
    """Yield the tokens of all sequences in pieces of PIECE_BYTES; the last piece can be shorter."""
    pending = bytearray()
    for sequence in sequences:
        pending += sequence.read_bytes()
        while len(pending) >= PIECE_BYTES:
            yield torch.frombuffer(pending[:PIECE_BYTES], dtype=torch.uint8)
            pending = pending[PIECE_BYTES:]
    if pending:
        yield torch.frombuffer(pending, dtype=torch.uint8)


def _receive(sequences: Sequence[StoredSequence], sender: int) -> dict[int, StoredSequence]:
    """Receive the sequences; return them by trajectory id."""
    content = torch.empty(count_bytes(sequences), dtype=torch.uint8)
    for piece in content.split(PIECE_BYTES) if len(content) else ():
        dist.recv(piece, sender)
    view, start = content.numpy().data, 0
    received: dict[int, StoredSequence] = {}
    for sequence in sequences:
        size = sequence.num_bytes
        received[sequence.trajectory_id] = sequence._replace(content=view[start : start + size])
        start += size
    return received
