"""Tests of the table of step states in engine/inference/running_batch.py."""

import numpy as np
from numpy.typing import NDArray

from asterism.engine.contract import GenerationRequest
from asterism.engine.inference.running_batch import RunningBatch
from asterism.engine.inference.sequence import MissingPages, Sequence
from tests.engine.tiny_models import random_ids


class NoRows:
    """A stand-in for BatchRows that stores no tokens."""

    def assign(self, joining: list[Sequence]) -> None: ...

    def append_pages(self, appended: list[MissingPages]) -> None: ...

    def activate(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None: ...

    def read_back(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return np.zeros(end, np.int32), np.zeros(end - first, np.float32)


def join(*new_tokens: int) -> RunningBatch:
    """Build a batch of sequences with 4 prompt tokens each; `new_tokens`: tokens to generate."""
    batch = RunningBatch(NoRows(), num_rows=4, page_tokens=16)
    sequences = [Sequence(number) for number in range(len(new_tokens))]
    for sequence, count in zip(sequences, new_tokens, strict=True):
        ids = random_ids(4, sequence.sequence_id)
        sequence.token_ids, sequence.pages = ids, [sequence.sequence_id]
        sequence.start_request(GenerationRequest(sequence.sequence_id, ids, count), 1)
    batch.join(sequences, version=0)
    return batch


def describe(batch: RunningBatch) -> tuple[list[int], int]:
    return batch.positions.tolist(), batch.num_unknown


def test_two_overlapped_steps_advance_positions_and_unknown_steps() -> None:
    batch = join(9, 9)
    assert describe(batch) == ([3, 3], 0)  # state "scheduled": position p = 3
    first = batch.launch()
    assert describe(batch) == ([4, 4], 1)
    assert first.positions.tolist() == [4, 4]
    second = batch.launch()  # launched while the first step is unknown
    assert describe(batch) == ([5, 5], 2)
    assert batch.mark_known(first) is None
    assert describe(batch) == ([5, 5], 1)  # state "known": position p + 1 + v
    ended = first.sequences[0]
    batch.drop_ended([(ended, 5)])
    assert describe(batch) == ([5], 1)  # state "dropped", for the kept sequence
    assert (ended.row, len(ended.token_ids), batch.num_free_rows) == (-1, 5, 3)
    surplus_free = batch.mark_known(second)
    assert surplus_free is not None and surplus_free.tolist() == [1]  # the first sequence has ended
    assert describe(batch) == ([5], 0)


def test_a_sequence_leaves_the_batch_but_keeps_its_row_after_its_last_launch() -> None:
    batch = join(1, 9)
    step = batch.launch()
    batch.retire_at_limit()
    assert (len(batch.sequences), batch.num_free_rows) == (1, 2)
    batch.mark_known(step)
    batch.drop_ended([(step.sequences[0], 5)])
    assert (len(batch.sequences), batch.num_free_rows) == (1, 3)
