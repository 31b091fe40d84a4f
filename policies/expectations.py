"""What the arbiter expects of a trajectory: lengths learned from the run, applied to one account of its books."""

from __future__ import annotations

from typing import Protocol

from policies.ledger import Holding
from policies.lengths import Lengths
from policies.lookahead import Expected


class Learned(Expected, Protocol):
    """Told of each request, and of each turn's and each trajectory's end."""

    def asked(self, holding: Holding) -> None: ...

    def turn_ended(self, holding: Holding) -> None: ...

    def ended(self, holding: Holding) -> None: ...


class Expectations:
    """Implements Learned."""

    def __init__(self, response_tokens: int) -> None:
        self.limit = response_tokens
        self._lengths = Lengths(response_tokens)
        self._expected: dict[int, float] = {}  # response tokens of those that were begun, siblings left aside
        self._so_far: dict[int, int] = {}  # response tokens of those that were begun, when they last asked

    def turn_ended(self, holding: Holding) -> None:
        self._lengths.turn_ended(holding.request.turn, holding.tokens - holding.turn_began_at)

    def asked(self, holding: Holding) -> None:
        if holding.leases:
            so_far = _response_tokens(holding)
            self._lengths.went_on(self._so_far.get(holding.trajectory_id), so_far)
            self._so_far[holding.trajectory_id] = so_far
            self._expect(holding, self._lengths.alone(so_far))

    def ended(self, holding: Holding) -> None:
        tokens = _response_tokens(holding)
        self._lengths.trajectory_ended(tokens, self._so_far.pop(holding.trajectory_id, None))
        self._expect(holding, float(tokens))
        del self._expected[holding.trajectory_id]

    def turn_tokens(self, holding: Holding, share: float) -> int:
        so_far = holding.tokens - holding.turn_began_at
        return self._lengths.turn_tokens(holding.request.turn, so_far, share)

    def final_tokens(self, holding: Holding) -> float:
        so_far = _response_tokens(holding)
        return holding.tokens - so_far + self._lengths.final_tokens(holding.group_id, so_far)

    def _expect(self, holding: Holding, tokens: float) -> None:
        self._lengths.expect(holding.group_id, self._expected.get(holding.trajectory_id), tokens)
        self._expected[holding.trajectory_id] = tokens


def _response_tokens(holding: Holding) -> int:
    return holding.tokens - holding.request.prompt_tokens
