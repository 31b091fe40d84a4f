"""Which of the server's data-parallel ranks takes a sequence: the one that has its cached prefix."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", int, bytes)

REMEMBERED = 65_536  # sequences, and prompts
SLACK = 8  # so many more than the least busy rank a prompt's rank may have, before another one takes its next sequence


class Ranks:
    """A sequence stays where its first request went. The sequences of one prompt go to one rank as far as it is not
    busier than others by more than SLACK; else to the least busy."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._in_flight: Counter[int] = Counter()
        self._of_sequence: OrderedDict[int, int] = OrderedDict()
        self._of_prompt: OrderedDict[bytes, int] = OrderedDict()

    def begin(self, sequence_id: int, token_ids: NDArray[np.int32]) -> int | None:
        """None where there is one rank alone."""
        if self._count == 1:
            return None
        rank = self._of_sequence.get(sequence_id)
        if rank is None:
            rank = self._for_prompt(hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest())
        _remember(self._of_sequence, sequence_id, rank)
        self._in_flight[rank] += 1
        return rank

    def end(self, rank: int | None) -> None:
        if rank is not None:
            self._in_flight[rank] -= 1

    def _for_prompt(self, prompt: bytes) -> int:
        least_busy = min(range(self._count), key=lambda rank: (self._in_flight[rank], rank))
        rank = self._of_prompt.get(prompt, least_busy)
        if self._in_flight[rank] > self._in_flight[least_busy] + SLACK:
            rank = least_busy
        _remember(self._of_prompt, prompt, rank)
        return rank


def _remember(ranks: OrderedDict[Key, int], key: Key, rank: int) -> None:
    ranks[key] = rank
    ranks.move_to_end(key)
    if len(ranks) > REMEMBERED:
        ranks.popitem(last=False)
