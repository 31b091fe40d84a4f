"""What an engine's trajectories will need at their worst moment to come, if they get as long as expected.

All grow by a token at a time and in step; each frees its pages at its end. When those with at most r tokens to go have
ended, the others have grown by r. So the worst moment is the end of one of them:

    peak = max over r of  sum of (tokens_i + r) over all i with remaining_i >= r
"""

from __future__ import annotations

import numpy as np

from policies.ledger import Holding

_FIRST_SIZE = 64


class Forecast:
    """Of one engine. Tokens; shared prompts are counted with every trajectory."""

    def __init__(self) -> None:
        self.committed = 0.0  # what all would need if all were at their ends at once: at least the peak
        self._tokens = np.zeros(_FIRST_SIZE)
        self._remaining = np.full(_FIRST_SIZE, -1.0)  # negative where there is none
        self._places: dict[int, int] = {}
        self._free = list(range(_FIRST_SIZE))

    def put(self, holding: Holding, final_tokens: float) -> None:
        place = self._places.get(holding.trajectory_id)
        if place is None:
            place = self._places[holding.trajectory_id] = self._free_place()
        else:
            self.committed -= float(self._tokens[place] + self._remaining[place])
        self._tokens[place] = holding.tokens
        self._remaining[place] = max(0.0, final_tokens - holding.tokens)
        self.committed += float(self._tokens[place] + self._remaining[place])

    def remove(self, holding: Holding) -> None:
        place = self._places.pop(holding.trajectory_id, None)
        if place is not None:
            self.committed -= float(self._tokens[place] + self._remaining[place])
            self._tokens[place], self._remaining[place] = 0.0, -1.0
            self._free.append(place)

    def longest(self) -> float:
        """Tokens that the one with the most of them to go is expected to need still."""
        return max(0.0, float(self._remaining.max()))

    def fits(self, tokens: float, final_tokens: float, room: float) -> bool:
        """Whether one more trajectory does not raise the worst moment beyond `room`."""
        if self.committed + final_tokens <= room:
            return True
        remaining = np.append(self._remaining, final_tokens - tokens)
        order = np.argsort(-remaining, kind="stable")[: len(self._places) + 1]
        remaining = remaining[order]
        sizes = np.append(self._tokens, tokens)[order].cumsum()
        return float((sizes + remaining * np.arange(1, len(order) + 1)).max()) <= room

    def _free_place(self) -> int:
        if not self._free:
            size = len(self._tokens)
            self._tokens = np.append(self._tokens, np.zeros(size))
            self._remaining = np.append(self._remaining, np.full(size, -1.0))
            self._free = list(range(size, 2 * size))
        return self._free.pop()
