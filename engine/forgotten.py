"""What forgotten sequences had had computed, so that one that comes back is known to be computed again.

Of each the number of its first tokens and their digest, the newest `REMEMBERED` sequences: less than 20 MiB.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from engine.sequences import Sequence

REMEMBERED = 65_536  # sequences; one more, and the one that was forgotten longest ago counts as new


class Forgotten:
    def __init__(self) -> None:
        self._computed: OrderedDict[int, tuple[int, bytes]] = OrderedDict()  # by sequence_id

    def keep(self, sequence: Sequence) -> None:
        if sequence.computed:
            digest = _digest(sequence.token_ids[: sequence.computed])
            self._computed[sequence.sequence_id] = sequence.computed, digest
        if len(self._computed) > REMEMBERED:
            self._computed.popitem(last=False)

    def recall(self, sequence_id: int, token_ids: NDArray[np.int32]) -> int:
        """How many of these first tokens it had had computed; 0 where they are not all the same."""
        count, digest = self._computed.pop(sequence_id, (0, b""))
        return count if len(token_ids) >= count > 0 and _digest(token_ids[:count]) == digest else 0

    def clear(self) -> None:
        """What comes back has to be computed under new weights anyhow."""
        self._computed.clear()


def _digest(token_ids: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(token_ids, np.int32).tobytes(), digest_size=16).digest()
