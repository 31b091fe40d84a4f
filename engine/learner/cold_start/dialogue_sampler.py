"""The order of the cold start's dialogues, drawn from files by weight, and their division into steps."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asterism.policies.seeded_random import shuffle_range


class StepSize(NamedTuple):
    """The size of a step, in dialogues or in tokens."""

    dialogues: int
    tokens: int = 0  # limit per step, which has at least one dialogue; 0: use `dialogues`


class SftSampler:
    """A sampler that selects each step's dialogues from files by weight.

    Each file has one permutation per epoch; a step can span two epochs. Files alternate as evenly as their weights
    allow: after any number of dialogues, each file's number differs from its share by less than the number of files.
    """

    def __init__(
        self,
        num_sequences: Sequence[int],
        weights: Sequence[float],
        size: StepSize,
        seed: int,
        lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """`num_sequences`, `weights`: one value per file. `lengths`: tokens of each dialogue, for `size.tokens`."""
        if min(num_sequences, default=0) == 0:
            raise ValueError("the cold start has no sequence to train on")
        self._num_sequences = num_sequences
        self._shares = [weight / sum(weights) for weight in weights]
        self._size = size
        self._seed = seed
        self._lengths = lengths
        self._starts = [0, *accumulate(num_sequences)]
        self._orders: dict[int, tuple[int, NDArray[np.int64]]] = {}  # epoch and permutation by file
        self._restart()

    def get_batch(self, step: int) -> list[int]:
        """Return the indices of a step's dialogues in the dialogues of all files: a function of seed and step.

        Steps count from 0. Calls for consecutive steps do not draw earlier steps again.
        """
        if step < self._next_step:
            self._restart()
        while self._next_step < step:
            self._draw_step()
        return [self._get_index(*position) for position in self._draw_step()]

    def count_steps(self, epochs: float) -> int:
        """Count the steps, at least 1, that contain `epochs` times the dialogues of all files."""
        wanted = max(1, math.ceil(round(epochs * sum(self._num_sequences), 6)))  # 1.1 * 10 is a little more than 11
        if not self._size.tokens:
            return math.ceil(wanted / self._size.dialogues)
        self._restart()
        drawn = 0
        while drawn < wanted:
            drawn += len(self._draw_step())
        return self._next_step

    def _restart(self) -> None:
        self._next_step = 0
        self._num_drawn = 0  # number of drawn dialogues of all files
        self._counts = [0] * len(self._num_sequences)  # number of drawn dialogues of each file
        self._pending: tuple[int, int] | None = None  # dialogue for which the previous step had no room

    def _draw_step(self) -> list[tuple[int, int]]:
        """Draw the next step: for each dialogue, its file and the number of earlier dialogues of this file."""
        self._next_step += 1
        if self._lengths is None or not self._size.tokens:
            return [self._draw() for _ in range(self._size.dialogues)]
        positions, tokens = list[tuple[int, int]](), 0
        while True:
            position = self._pending or self._draw()
            tokens += int(self._lengths[self._get_index(*position)])
            if positions and tokens > self._size.tokens:
                self._pending = position
                return positions
            self._pending = None
            positions.append(position)

    def _draw(self) -> tuple[int, int]:
        """Draw a dialogue from the file with the largest gap between its share and its count."""
        self._num_drawn += 1
        lacks = [share * self._num_drawn - count for share, count in zip(self._shares, self._counts, strict=True)]
        file = max(range(len(lacks)), key=lacks.__getitem__)
        self._counts[file] += 1
        return file, self._counts[file] - 1

    def _get_index(self, file: int, position: int) -> int:
        epoch, offset = divmod(position, self._num_sequences[file])
        if self._orders.get(file, (-1,))[0] != epoch:
            keys = (self._seed, epoch, file) if file else (self._seed, epoch)
            self._orders[file] = epoch, np.array(shuffle_range(self._num_sequences[file], *keys))
        return self._starts[file] + int(self._orders[file][1][offset])
