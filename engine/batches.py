"""From token lists and rows to what each rank trains on, the same for any number of ranks taken together.

A minibatch (one optimizer update) is dealt to the ranks by length, and each rank cuts its share into micro batches (one
forward and backward pass). Nothing here depends on the order in which rows arrived, and nothing is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.messages import ProtocolError, Row
from policies.draws import shuffled
from policies.staleness import oldest_version


class TrainingSequence(NamedTuple):
    """What is trained on. T tokens, prompt included."""

    token_ids: NDArray[np.int32]  # [T]; ends with a counted token
    loss_mask: NDArray[np.bool_]  # [T]; the first token is never counted: nothing predicts it
    logprobs: NDArray[np.float32]  # [T], under the policy that generated the token; zeros in the cold start
    advantage: float

    @property
    def counted(self) -> int:
        return int(self.loss_mask.sum())


def training_sequence(
    token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], logprobs: NDArray[np.float32], advantage: float
) -> TrainingSequence:
    """What follows the last counted token is cut off: nothing that counts depends on it.

    Raises ValueError if the arrays differ in length.
    """
    if not len(token_ids) == len(loss_mask) == len(logprobs):
        raise ValueError(f"{len(token_ids)} token ids, {len(loss_mask)} mask entries, {len(logprobs)} logprobs")
    counted = loss_mask.copy()
    counted[:1] = False
    end = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return TrainingSequence(token_ids[:end], counted[:end], logprobs[:end], advantage)


def sft_sequence(token_ids: Iterable[int], loss_mask: Iterable[int | bool]) -> TrainingSequence:
    ids = np.fromiter(token_ids, np.int32)
    return training_sequence(ids, np.fromiter(loss_mask, np.bool_), np.zeros(len(ids), np.float32), 1.0)


def row_sequence(row: Row) -> TrainingSequence:
    """Raises ValueError, naming the trajectory, if the row's arrays do not fit together."""
    try:
        return training_sequence(
            np.frombuffer(row.token_ids, "<i4"),
            np.frombuffer(row.loss_mask, np.uint8).astype(np.bool_),
            np.frombuffer(row.logprobs, "<f4"),
            row.advantage,
        )
    except ValueError as error:
        raise ValueError(f"trajectory {row.trajectory_id}: {error}") from error


def check_versions(rows: Iterable[Row], step: int, max_staleness: int) -> None:
    """Raises ProtocolError, naming the first trajectory with a counted token that `step` may not train on: from a version
    that is too old, or later than the one that it updates."""
    oldest, newest = oldest_version(step, max_staleness), step - 1
    for row in rows:
        counted = np.frombuffer(row.loss_mask, np.uint8).astype(np.bool_)
        versions = np.frombuffer(row.versions, "<i4")[counted]
        outside = versions[(versions < oldest) | (versions > newest)]
        if len(outside):
            allowed = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
            raise ProtocolError(
                f"trajectory {row.trajectory_id} has {len(outside)} tokens of version {outside[0]} to train on: step {step} "
                f"takes {allowed} (rl.max_staleness = {max_staleness})"
            )


def rl_minibatches(rows: Sequence[Row], count: int, seed: int, step: int) -> list[list[TrainingSequence]]:
    """At most `count` minibatches of whole groups, as equal in groups as can be; which group comes when depends on
    seed and step alone."""
    groups: defaultdict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.group_id, row.trajectory_id)):
        groups[row.group_id].append(row)
    in_order = list(groups.values())
    drawn = [in_order[index] for index in shuffled(len(in_order), seed, step)]
    parts = min(count, len(drawn))
    cuts = [len(drawn) * part // parts for part in range(parts + 1)] if parts else []
    return [[row_sequence(row) for group in drawn[start:end] for row in group] for start, end in pairwise(cuts)]


class SftOrder:
    """Which sequences a step of the cold start takes: one permutation an epoch, batches run across its border."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        if count == 0:
            raise ValueError("there is no sequence to train on")
        self._count = count
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def batch(self, step: int) -> list[int]:
        """Indices of the sequences of `step`, counted from 0: a function of seed and step."""
        first = step * self._batch_size
        return [self._at(position) for position in range(first, first + self._batch_size)]

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(self._count, self._seed, epoch)
        return self._order[offset]


def split(sequences: Sequence[TrainingSequence], ranks: int, micro_batch_tokens: int) -> list[list[list[int]]]:
    """For each rank its micro batches, each a list of indices; every rank has the same
    number of them, at least one, perhaps empty.

    A micro batch holds at most `micro_batch_tokens` padded tokens; a sequence longer than that stands alone.
    Sequences without a counted token are left out: they add nothing to a sum.
    """
    counted = [index for index, sequence in enumerate(sequences) if sequence.counted]
    longest_first = sorted(counted, key=lambda index: (-len(sequences[index].token_ids), index))
    lengths = [len(sequence.token_ids) - 1 for sequence in sequences]
    cut = [_cut(longest_first[rank::ranks], lengths, micro_batch_tokens) for rank in range(ranks)]
    most = max(1, *(len(micro_batches) for micro_batches in cut))
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in cut]


def _cut(longest_first: list[int], lengths: list[int], micro_batch_tokens: int) -> list[list[int]]:
    micro_batches: list[list[int]] = []
    width = 0
    for index in longest_first:
        if not micro_batches or (len(micro_batches[-1]) + 1) * width > micro_batch_tokens:
            micro_batches.append([])
            width = lengths[index]
        micro_batches[-1].append(index)
    return micro_batches
