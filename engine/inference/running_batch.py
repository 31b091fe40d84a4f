"""The running sequences, each in a row, with their positions and pages. This module uses no tensors.

A step is launched before its tokens are known. The table shows the states of a step that reads tokens at positions p; u
is 1 if the previous step's tokens are unknown, v is 1 if the next step is launched (both 0 without overlapping steps):

    state      after          positions              num_unknown  EngineCore._pending  new tokens
    ---------  -------------  ---------------------  -----------  -------------------  -------------------------------
    scheduled  schedule_step  p                      u            previous step        none yet; they have pages
    launched   launch         p + 1                  u + 1        this step            on the device
    known      mark_known     p + 1 + v              v            next step            in main memory (record_tokens)
    dropped    drop_ended     p + 1 + v (kept rows)  v            next step            of ended sequences: in Sequence

`_pending` is None if there is no such step, and always without overlapping steps. A sequence that ends with a stop
token is part of the next step if that step is launched already; `mark_known` skips its surplus token. A complete
sequence leaves `sequences` at the next `schedule_step` (`retire_at_limit`), and its row at `drop_ended`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asterism.engine.inference.sequence import MissingPages, Sequence

# (join ids, positions) -> the order in which to run the sequences, as indices into both
BatchOrder = Callable[[list[int], list[int]], list[int]]
EndedSequence = tuple[Sequence, int]  # the sequence and the number of its tokens


class BatchRows(Protocol):
    """The storage of running sequences' tokens and pages: asterism.engine.inference.batch_state.BatchState."""

    def assign(self, joining: list[Sequence], /) -> None: ...

    def append_pages(self, appended: list[MissingPages], /) -> None: ...

    def read_back(self, row: int, first: int, end: int, /) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...

    def activate(self, rows: NDArray[np.int64], positions: NDArray[np.int64], /) -> None: ...


class LaunchedStep(NamedTuple):
    """A step that gives each of B sequences one token. The device can still be computing it."""

    sequences: list[Sequence]
    positions: NDArray[np.int64]  # positions of the new tokens
    rows: NDArray[np.int64]
    join_ids: NDArray[np.int64]
    num_drops: int  # RunningBatch.num_drops at the launch

    def select(self, indices: NDArray[np.int64]) -> LaunchedStep:
        sequences = [self.sequences[index] for index in indices.tolist()]
        positions, rows, join_ids = self.positions[indices], self.rows[indices], self.join_ids[indices]
        return LaunchedStep(sequences, positions, rows, join_ids, self.num_drops)


class RunningBatch:
    """A batch of B sequences; `sequences` and `positions` are in the order of the active rows."""

    def __init__(self, rows: BatchRows, num_rows: int, page_tokens: int, order: BatchOrder | None = None) -> None:
        """Sequences run in the order in which they join, unless `order` is given."""
        self.sequences: list[Sequence] = []
        # each sequence's position, last position that the request allows, row, number of pages, join id
        self._state = np.zeros((5, 0), np.int64)
        self._rows, self._page_tokens, self._order = rows, page_tokens, order
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._join_id_by_row = np.zeros(num_rows, np.int64)  # 0 for a free row
        self._is_arranged = True
        self.num_joins = self.num_drops = 0  # num_drops counts calls of drop_ended
        self.num_unknown = 0  # number of launched steps with unknown tokens

    @property
    def positions(self) -> NDArray[np.int64]:
        """The positions of the tokens that the next step reads, [B]."""
        return self._state[0]

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def count_steps_to_limit(self) -> int:
        """Return the number of steps until the first sequence has all tokens that its request allows."""
        return int((self._state[1] - self._state[0]).min())

    def list_at_limit(self) -> list[int]:
        """Return the indices of the sequences that get their last allowed token in the next step."""
        return (self._state[1] - self._state[0] <= 1).nonzero()[0].tolist()

    # ------------------------------------------------------------ pages

    def count_missing_pages(self, steps: int) -> int:
        """Return the number of pages that all sequences lack for `steps` further tokens each."""
        return int(self._compute_missing_pages(steps).sum())

    def list_missing_pages(self) -> list[MissingPages]:
        """Return the sequences that lack pages for their next token."""
        missing_B, sequences = self._compute_missing_pages(1), self.sequences
        (short,) = missing_B.nonzero()
        counts = missing_B[short].tolist()
        return [(sequences[index], count) for index, count in zip(short.tolist(), counts, strict=True)]

    def on_pages_appended(self, appended: list[MissingPages]) -> None:
        if appended:
            self._state[3] += self._compute_missing_pages(1)
            self._rows.append_pages(appended)

    def _compute_missing_pages(self, steps: int) -> NDArray[np.int64]:
        """Return each sequence's missing pages, [B]. A sequence never has more pages than its next token needs."""
        return (self._state[0] + (steps - 1 + self._page_tokens)) // self._page_tokens - self._state[3]

    # ------------------------------------------------------------ members

    def join(self, joining: list[Sequence], version: int) -> None:
        """Give each sequence a free row; its next token has this policy version."""
        for sequence in joining:
            sequence.row = self._free_rows.pop()
            self.num_joins += 1
            sequence.join_id = self._join_id_by_row[sequence.row] = self.num_joins
            sequence.record_version(len(sequence.token_ids), version)
        self._rows.assign(joining)
        state = np.array([_describe_state(sequence) for sequence in joining]).T
        self._set_members([*self.sequences, *joining], np.concatenate((self._state, state), axis=1))

    def retire_at_limit(self) -> None:
        """Take sequences with all tokens of their requests out of the batch. They keep their rows until all tokens are
        known."""
        if self.num_unknown:
            (kept,) = (self._state[0] < self._state[1]).nonzero()
            self._keep(kept)

    def drop_ended(self, ended: list[EndedSequence]) -> None:
        """Copy the tokens of these sequences out of their rows and free the rows."""
        self.num_drops += 1
        for sequence, num_tokens in ended:
            self._release_row(sequence, num_tokens)
        (kept,) = (self._join_id_by_row[self._state[2]] == self._state[4]).nonzero()
        self._keep(kept)

    def count_tokens(self, sequence: Sequence) -> int:
        """Return the number of known tokens of a running sequence."""
        return int(self.positions[self.sequences.index(sequence)]) + 1 - self.num_unknown

    def read_tokens(self, sequence: Sequence, first: int) -> NDArray[np.int32]:
        """Return the known tokens of a running sequence from position `first` on."""
        return self._rows.read_back(sequence.row, first, self.count_tokens(sequence))[0][first:]

    # ------------------------------------------------------------ one step

    def arrange(self) -> None:
        """Make the sequences' rows active, in the order that suits attention."""
        if self._is_arranged:
            return
        if self._order is not None:
            order = self._order(self._state[4].tolist(), self._state[0].tolist())
            self.sequences, self._state = [self.sequences[index] for index in order], self._state[:, order]
        self._rows.activate(self._state[2], self._state[0])
        self._is_arranged = True

    def launch(self) -> LaunchedStep:
        """Give each sequence a token, which is unknown until `mark_known`."""
        self.advance()
        self.num_unknown += 1
        state = self._state
        return LaunchedStep(self.sequences, state[0].copy(), state[2], state[4], self.num_drops)

    def mark_known(self, step: LaunchedStep) -> NDArray[np.int64] | None:
        """Return the indices of sequences that had not ended before the step; None if no sequence had ended."""
        self.num_unknown -= 1
        if step.num_drops == self.num_drops:
            return None
        return (self._join_id_by_row[step.rows] == step.join_ids).nonzero()[0]

    def advance(self, steps: int = 1) -> None:
        """Advance the position of each sequence by `steps`."""
        self._state[0] += steps

    def _keep(self, kept: NDArray[np.int64]) -> None:
        if len(kept) < len(self.sequences):
            self._set_members([self.sequences[index] for index in kept.tolist()], self._state[:, kept])

    def _set_members(self, running: list[Sequence], state: NDArray[np.int64]) -> None:
        self.sequences, self._state, self._is_arranged = running, state, False

    def _release_row(self, sequence: Sequence, num_tokens: int) -> None:
        assert sequence.request is not None
        first = len(sequence.request.token_ids)
        sequence.token_ids, sequence.logprobs = self._rows.read_back(sequence.row, first, num_tokens)
        sequence.cached_tokens = num_tokens - 1  # the model has not read the last token
        sequence.computed_tokens = max(sequence.computed_tokens, num_tokens - 1)
        self._free_rows.append(sequence.row)
        self._join_id_by_row[sequence.row] = 0
        sequence.row = -1


def _describe_state(sequence: Sequence) -> tuple[int, int, int, int, int]:
    """Return the sequence's column of RunningBatch._state at its join."""
    assert sequence.request is not None
    last_position = len(sequence.request.token_ids) + sequence.request.max_new_tokens - 1
    return len(sequence.token_ids) - 1, last_position, sequence.row, len(sequence.pages), sequence.join_id
