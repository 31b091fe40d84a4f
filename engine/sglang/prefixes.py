"""What each sequence has had in the server's cache, so that what is missing there is known to be computed again.

Of each the number of its first tokens and their digest, the newest REMEMBERED sequences. An estimate: the server frees by
itself, least recently used first, and says so only where a sequence comes back.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

REMEMBERED = 65_536


class Prefix(NamedTuple):
    tokens: int
    digest: bytes
    wanted: bool  # False: nobody will ask for it again, as far as is known


class Prefixes:
    def __init__(self) -> None:
        self._kept: OrderedDict[int, Prefix] = OrderedDict()  # by sequence_id
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Of all sequences together, where none is shared and none has been evicted."""
        return self._tokens

    def keep(self, sequence_id: int, token_ids: NDArray[np.int32]) -> None:
        """These have been computed for it."""
        self._drop(sequence_id)
        self._kept[sequence_id] = Prefix(len(token_ids), _digest(token_ids), wanted=True)
        self._tokens += len(token_ids)
        if len(self._kept) > REMEMBERED:
            self._drop(next(iter(self._kept)))

    def forget(self, sequence_id: int) -> None:
        if (prefix := self._kept.get(sequence_id)) is not None:
            self._kept[sequence_id] = prefix._replace(wanted=False)

    def recall(self, sequence_id: int, token_ids: NDArray[np.int32]) -> Prefix | None:
        """What it had had computed; None where these tokens do not begin with all of that."""
        prefix = self._drop(sequence_id)
        if prefix is None or len(token_ids) < prefix.tokens or _digest(token_ids[: prefix.tokens]) != prefix.digest:
            return None
        return prefix

    def clear(self) -> None:
        """What comes back has to be computed under new weights anyhow."""
        self._kept.clear()
        self._tokens = 0

    def _drop(self, sequence_id: int) -> Prefix | None:
        prefix = self._kept.pop(sequence_id, None)
        if prefix is not None:
            self._tokens -= prefix.tokens
        return prefix


def _digest(token_ids: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(token_ids, np.int32).tobytes(), digest_size=16).digest()
