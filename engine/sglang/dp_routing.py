"""Routes each sequence to the data-parallel rank that caches its prefix."""

import hashlib
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from asterism.engine.prefix_tracker import RecentDict

MAX_IMBALANCE = 8  # limit of requests in flight on a prompt's rank minus those on the least busy rank


class DataParallelRouter:
    """Assigns a data-parallel rank to each sequence; a sequence stays on the rank of its first request.

    All sequences of one prompt use the same rank. If this rank has more than MAX_IMBALANCE more requests than the least
    busy rank, the next sequence uses the least busy rank.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._in_flight: Counter[int] = Counter()
        self._rank_by_sequence: RecentDict[int, int] = RecentDict()
        self._rank_by_prompt: RecentDict[bytes, int] = RecentDict()

    def assign(self, sequence_id: int, token_ids: NDArray[np.int32]) -> int | None:
        """Return the sequence's rank, or None if the server has only one rank."""
        if self._num_ranks == 1:
            return None
        rank = self._rank_by_sequence.get(sequence_id)
        if rank is None:
            rank = self._choose_for_prompt(hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest())
        self._rank_by_sequence[sequence_id] = rank
        self._in_flight[rank] += 1
        return rank

    def release(self, rank: int | None) -> None:
        if rank is not None:
            self._in_flight[rank] -= 1

    def _choose_for_prompt(self, prompt: bytes) -> int:
        least_busy = min(range(self._num_ranks), key=lambda rank: (self._in_flight[rank], rank))
        rank = self._rank_by_prompt.get(prompt, least_busy)
        if self._in_flight[rank] > self._in_flight[least_busy] + MAX_IMBALANCE:
            rank = least_busy
        self._rank_by_prompt[prompt] = rank
        return rank
