"""What the arbiter expects of a trajectory: lengths learned from the run, applied to one account of its books."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.ledger import Holding
from policies.lengths import Lengths
from policies.lookahead import Expected


class Learned(Expected, Protocol):
    """Told of each request and lease, and of each turn's and each trajectory's end."""

    def asked(self, holding: Holding) -> None: ...

    def leased(self, holding: Holding) -> None: ...

    def turn_ended(self, holding: Holding) -> None: ...

    def ended(self, holding: Holding) -> None: ...


class Expectations:
    """Implements Learned."""

    def __init__(self, response_tokens: int, lengths: Lengths | None = None) -> None:
        """`lengths`: what is known before the first trajectory; else nothing is."""
        self.limit = response_tokens
        self._lengths = lengths or Lengths(response_tokens)
        self._expected: dict[int, float] = {}  # response tokens of those that were begun, siblings left aside
        self._until: dict[int, int] = {}  # response tokens until which each was taken to live

    def turn_ended(self, holding: Holding) -> None:
        self._lengths.turn_ended(holding.request.turn, holding.tokens - holding.turn_began_at)

    def asked(self, holding: Holding) -> None:
        if holding.leases:
            self._expect(holding, self._lengths.alone(_response_tokens(holding)))

    def leased(self, holding: Holding) -> None:
        before = self._until.get(holding.trajectory_id, 0)
        until = holding.leased_tokens - holding.request.prompt_tokens
        if until > before:
            self._lengths.trajectory_lives(before, until)
            self._until[holding.trajectory_id] = until

    def ended(self, holding: Holding) -> None:
        if not holding.leases:  # it was given up before it was begun
            return
        tokens = _response_tokens(holding)
        self._lengths.trajectory_ended(self._until.pop(holding.trajectory_id, 0), tokens)
        self._expect(holding, float(tokens))
        del self._expected[holding.trajectory_id]

    def turn_tokens(self, holding: Holding, share: float) -> int:
        so_far = holding.tokens - holding.turn_began_at
        return self._lengths.turn_tokens(holding.request.turn, so_far, share)

    def final_tokens(self, holding: Holding) -> float:
        prompt = holding.request.prompt_tokens
        return prompt + self._lengths.final_tokens(holding.group_id, holding.tokens - prompt)

    def alive(self, holding: Holding) -> NDArray[np.float64]:
        return self._lengths.alive(holding.group_id, _response_tokens(holding))

    def _expect(self, holding: Holding, tokens: float) -> None:
        self._lengths.expect(holding.group_id, self._expected.get(holding.trajectory_id), tokens)
        self._expected[holding.trajectory_id] = tokens


def _response_tokens(holding: Holding) -> int:
    return holding.tokens - holding.request.prompt_tokens
