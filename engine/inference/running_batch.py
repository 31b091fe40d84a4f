"""The running sequences, each in a row, with their positions and pages. No tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.contract import GenerationRequest
from engine.inference.sequence import Sequence

_NO_POSITIONS = np.zeros(0, np.int64)

# (join ids, positions) -> the order in which to run the sequences, as indices into both
BatchOrder = Callable[[list[int], list[int]], list[int]]


class BatchRows(Protocol):
    """Where the tokens and pages of running sequences are stored: engine.inference.batch_state.BatchState."""

    def assign(
        self,
        row: int,
        request: GenerationRequest,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        pages: list[int],
    ) -> None: ...

    def append_page(self, row: int, page_index: int, page: int) -> None: ...

    def read_back(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...

    def activate(self, rows: list[int], positions: list[int]) -> None: ...


class RunningBatch:
    """B sequences; `sequences` and `positions` are in the order of the active rows."""

    def __init__(self, rows: BatchRows, num_rows: int, page_tokens: int, order: BatchOrder) -> None:
        self.sequences: list[Sequence] = []
        self.positions = _NO_POSITIONS  # [B], of the tokens that the next step reads
        self._allocated_tokens = _NO_POSITIONS  # [B], tokens that fit in each sequence's pages
        self._rows, self._page_tokens, self._order = rows, page_tokens, order
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_joins = 0

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def list_short_of_pages(self) -> list[Sequence]:
        """Sequences that need a page for their next token, the oldest request first."""
        short = [self.sequences[index] for index in np.flatnonzero(self.positions >= self._allocated_tokens)]
        return sorted(short, key=lambda sequence: sequence.arrival)

    def on_page_appended(self, sequence: Sequence) -> None:
        self._rows.append_page(sequence.row, len(sequence.pages) - 1, sequence.pages[-1])
        self._allocated_tokens[self.sequences.index(sequence)] = len(sequence.pages) * self._page_tokens

    def join(self, joining: list[Sequence], version: int) -> None:
        """Give each sequence a free row; its next token has this policy version."""
        for sequence in joining:
            sequence.row = self._free_rows.pop()
            self._num_joins += 1
            sequence.join_id = self._num_joins
            sequence.record_version(len(sequence.token_ids), version)
            assert sequence.request is not None
            self._rows.assign(sequence.row, sequence.request, sequence.token_ids, sequence.logprobs, sequence.pages)
        self._arrange([*self.sequences, *joining])

    def remove(self, removed: list[Sequence]) -> None:
        """Copy the tokens of these sequences out of their rows and free the rows."""
        for sequence in removed:
            self._release_row(sequence, int(self.positions[self.sequences.index(sequence)]) + 1)
        self._arrange([sequence for sequence in self.sequences if sequence.row >= 0])

    def advance(self) -> None:
        """Each sequence has one more token."""
        self.positions += 1

    def _arrange(self, running: list[Sequence]) -> None:
        """Make these sequences the batch, in the order that suits attention."""
        current = {sequence.row: position for sequence, position in zip(self.sequences, self.positions, strict=True)}
        position_by_row = {sequence.row: len(sequence.token_ids) - 1 for sequence in running} | current
        join_ids = [sequence.join_id for sequence in running]
        positions = [int(position_by_row[sequence.row]) for sequence in running]
        running = [running[index] for index in self._order(join_ids, positions)]
        self.sequences = running
        self.positions = np.array([position_by_row[sequence.row] for sequence in running], np.int64)
        self._allocated_tokens = np.array([len(sequence.pages) * self._page_tokens for sequence in running], np.int64)
        self._rows.activate([sequence.row for sequence in running], self.positions.tolist())

    def _release_row(self, sequence: Sequence, end: int) -> None:
        """`end`: tokens of the sequence."""
        assert sequence.request is not None
        first = len(sequence.request.token_ids)
        sequence.token_ids, sequence.logprobs = self._rows.read_back(sequence.row, first, end)
        sequence.cached_tokens = end - 1  # the model has not read the last token
        sequence.computed_tokens = max(sequence.computed_tokens, end - 1)
        self._free_rows.append(sequence.row)
        sequence.row = -1
