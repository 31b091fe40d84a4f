"""What the arbiter expects of a trajectory: lengths learned from the run, applied to one account of its books."""

from __future__ import annotations

from typing import Protocol

from policies.ledger import Holding
from policies.lengths import Lengths
from policies.lookahead import Expected


class Learned(Expected, Protocol):
    """Told of each turn's and each trajectory's end."""

    def turn_ended(self, holding: Holding) -> None: ...

    def ended(self, holding: Holding) -> None: ...


class Expectations:
    """Implements Learned."""

    def __init__(self, response_tokens: int) -> None:
        self._lengths = Lengths(response_tokens)

    def turn_ended(self, holding: Holding) -> None:
        self._lengths.turn_ended(holding.request.turn, holding.tokens - holding.turn_began_at)

    def ended(self, holding: Holding) -> None:
        self._lengths.trajectory_ended(holding.group_id, holding.tokens - holding.request.prompt_tokens)

    def turn_tokens(self, holding: Holding, share: float) -> int:
        so_far = holding.tokens - holding.turn_began_at
        return self._lengths.turn_tokens(holding.request.turn, so_far, share)

    def final_tokens(self, holding: Holding) -> float:
        prompt_tokens = holding.request.prompt_tokens
        return prompt_tokens + self._lengths.final_tokens(holding.group_id, holding.tokens - prompt_tokens)
