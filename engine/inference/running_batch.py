"""The running sequences, each in a row, with their positions and pages. No tensors."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.contract import GenerationRequest
from engine.inference.sequence import MissingPages, Sequence

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
        /,
    ) -> None: ...

    def append_pages(self, appended: list[MissingPages], /) -> None: ...

    def read_back(self, row: int, first: int, end: int, /) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...

    def activate(self, rows: NDArray[np.int64], positions: NDArray[np.int64], /) -> None: ...


class RunningBatch:
    """B sequences; `sequences` and `positions` are in the order of the active rows."""

    def __init__(self, rows: BatchRows, num_rows: int, page_tokens: int, order: BatchOrder | None = None) -> None:
        """Without `order`, sequences run in the order in which they join."""
        self.sequences: list[Sequence] = []
        # of each: position, last position that the request allows, row, number of pages
        self._state = np.zeros((4, 0), np.int64)
        self._rows, self._page_tokens, self._order = rows, page_tokens, order
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.num_joins = 0

    @property
    def positions(self) -> NDArray[np.int64]:
        """Of the tokens that the next step reads, [B]."""
        return self._state[0]

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def count_steps_to_limit(self) -> int:
        """Steps until the first sequence has all tokens that its request allows."""
        return int((self._state[1] - self._state[0]).min())

    def list_at_limit(self) -> list[int]:
        """Indices of the sequences that reach this limit in the next step."""
        return (self._state[1] - self._state[0] <= 1).nonzero()[0].tolist()

    def count_missing_pages(self, steps: int) -> int:
        """Pages that the sequences lack for so many further tokens each."""
        return int(self._compute_missing_pages(steps).sum())

    def list_missing_pages(self) -> list[MissingPages]:
        """Sequences that lack pages for their next token."""
        missing_B, sequences = self._compute_missing_pages(1), self.sequences
        (short,) = missing_B.nonzero()
        counts = missing_B[short].tolist()
        return [(sequences[index], count) for index, count in zip(short.tolist(), counts, strict=True)]

    def on_pages_appended(self, appended: list[MissingPages]) -> None:
        if appended:
            self._state[3] += self._compute_missing_pages(1)
            self._rows.append_pages(appended)

    def join(self, joining: list[Sequence], version: int) -> None:
        """Give each sequence a free row; its next token has this policy version."""
        for sequence in joining:
            sequence.row = self._free_rows.pop()
            self.num_joins += 1
            sequence.join_id = self.num_joins
            sequence.record_version(len(sequence.token_ids), version)
            assert sequence.request is not None
            self._rows.assign(sequence.row, sequence.request, sequence.token_ids, sequence.logprobs, sequence.pages)
        state = np.array([_describe_state(sequence) for sequence in joining]).T
        self._arrange([*self.sequences, *joining], np.concatenate((self._state, state), axis=1))

    def remove(self, removed: list[Sequence]) -> None:
        """Copy the tokens of these sequences out of their rows and free the rows."""
        stays = np.ones(len(self.sequences), np.bool_)
        for sequence in removed:
            index = self.sequences.index(sequence)
            stays[index] = False
            self._release_row(sequence, int(self.positions[index]) + 1)
        for sequence in removed:
            self.sequences.remove(sequence)
        self._arrange(self.sequences, self._state[:, stays])

    def read_tokens(self, sequence: Sequence, first: int) -> NDArray[np.int32]:
        """The tokens of a running sequence from position `first` on."""
        end = int(self.positions[self.sequences.index(sequence)]) + 1
        return self._rows.read_back(sequence.row, first, end)[0][first:]

    def advance(self, steps: int = 1) -> None:
        """Each sequence has so many more tokens."""
        self._state[0] += steps

    def _compute_missing_pages(self, steps: int) -> NDArray[np.int64]:
        """Of each sequence, [B]; a sequence never has more pages than it needs for its next token."""
        return (self._state[0] + (steps - 1 + self._page_tokens)) // self._page_tokens - self._state[3]

    def _arrange(self, running: list[Sequence], state: NDArray[np.int64]) -> None:
        """Make these sequences the batch, in the order that suits attention."""
        if self._order is not None:
            order = self._order([sequence.join_id for sequence in running], state[0].tolist())
            running, state = [running[index] for index in order], state[:, order]
        self.sequences, self._state = running, state
        self._rows.activate(state[2], state[0])

    def _release_row(self, sequence: Sequence, end: int) -> None:
        """`end`: tokens of the sequence."""
        assert sequence.request is not None
        first = len(sequence.request.token_ids)
        sequence.token_ids, sequence.logprobs = self._rows.read_back(sequence.row, first, end)
        sequence.cached_tokens = end - 1  # the model has not read the last token
        sequence.computed_tokens = max(sequence.computed_tokens, end - 1)
        self._free_rows.append(sequence.row)
        sequence.row = -1


def _describe_state(sequence: Sequence) -> tuple[int, int, int, int]:
    """The sequence's column of RunningBatch._state when it joins."""
    assert sequence.request is not None
    last_position = len(sequence.request.token_ids) + sequence.request.max_new_tokens - 1
    return len(sequence.token_ids) - 1, last_position, sequence.row, len(sequence.pages)
