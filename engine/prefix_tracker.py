"""Keeps tables of recent keys, and the prefix that each recent sequence had in the KV cache.

The prefixes serve to count the tokens that are recomputed when a sequence returns. An entry holds the number of tokens
and their digest: about 20 MiB in all.
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_TRACKED = 65_536  # keys; a further key replaces the least recently recorded one
K = TypeVar("K")
V = TypeVar("V")


class RecentDict(OrderedDict[K, V]):
    """Holds the MAX_TRACKED keys that were assigned most recently."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > MAX_TRACKED:
            self.popitem(last=False)


class CachedPrefix(NamedTuple):
    num_tokens: int
    digest: bytes
    is_active: bool  # False: no further request of the sequence is expected


class PrefixTracker:
    def __init__(self) -> None:
        self._prefixes: OrderedDict[int, CachedPrefix] = OrderedDict()  # prefixes by sequence_id
        self.num_tokens = 0  # tokens of all sequences, as if no prefix were shared or evicted

    def record(self, sequence_id: int, token_ids: NDArray[np.int32]) -> None:
        """Record that the sequence's KV cache holds these tokens."""
        self._remove(sequence_id)
        self._prefixes[sequence_id] = CachedPrefix(len(token_ids), _compute_digest(token_ids), is_active=True)
        self.num_tokens += len(token_ids)
        if len(self._prefixes) > MAX_TRACKED:
            self._remove(next(iter(self._prefixes)))

    def mark_inactive(self, sequence_id: int) -> None:
        if (prefix := self._prefixes.get(sequence_id)) is not None:
            self._prefixes[sequence_id] = prefix._replace(is_active=False)

    def pop_matching(self, sequence_id: int, token_ids: NDArray[np.int32]) -> CachedPrefix | None:
        """Return the sequence's recorded prefix; None if `token_ids` does not start with all of it."""
        prefix = self._remove(sequence_id)
        if (
            prefix is None
            or len(token_ids) < prefix.num_tokens
            or _compute_digest(token_ids[: prefix.num_tokens]) != prefix.digest
        ):
            return None
        return prefix

    def clear(self) -> None:
        """Remove all prefixes, because every prefix must be recomputed with new weights."""
        self._prefixes.clear()
        self.num_tokens = 0

    def _remove(self, sequence_id: int) -> CachedPrefix | None:
        prefix = self._prefixes.pop(sequence_id, None)
        if prefix is not None:
            self.num_tokens -= prefix.num_tokens
        return prefix


def _compute_digest(token_ids: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(token_ids, np.int32).tobytes(), digest_size=16).digest()
