"""The arbiter's length forecast: statistics of the run, applied to ledger accounts."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from asterism.policies.arbiter.kv_ledger import KvAccount
from asterism.policies.arbiter.length_stats import LengthStats
from asterism.policies.arbiter.policy import LengthForecast


class OnlineLengthForecast(LengthForecast, Protocol):
    """A forecast updated by requests, leases, and ends of turns and trajectories."""

    def on_lease_requested(self, account: KvAccount) -> None: ...

    def on_leased(self, account: KvAccount) -> None: ...

    def on_turn_ended(self, account: KvAccount) -> None: ...

    def on_trajectory_ended(self, account: KvAccount) -> None: ...


class LearnedLengthForecast:
    """The length forecast from statistics of the run (implements OnlineLengthForecast)."""

    def __init__(self, response_tokens: int, length_stats: LengthStats | None = None) -> None:
        """`length_stats`: statistics known before the first trajectory."""
        self.limit = response_tokens
        self._length_stats = length_stats or LengthStats(response_tokens)
        # Expected response tokens of each started trajectory, without the influence of its siblings.
        self._expected_tokens: dict[int, float] = {}
        # Response tokens until which each trajectory is assumed to survive.
        self._assumed_alive_until: dict[int, int] = {}

    def on_turn_ended(self, account: KvAccount) -> None:
        self._length_stats.add_turn(account.request.turn, account.tokens - account.turn_start_tokens)

    def on_lease_requested(self, account: KvAccount) -> None:
        if account.num_leases:
            expected = self._length_stats.survival.compute_mean_beyond(_count_response_tokens(account))
            self._update_expected_tokens(account, expected)

    def on_leased(self, account: KvAccount) -> None:
        before = self._assumed_alive_until.get(account.trajectory_id, 0)
        until = account.leased_tokens - account.request.prompt_tokens
        if until > before:
            self._length_stats.survival.assume_alive(before, until)
            self._assumed_alive_until[account.trajectory_id] = until

    def on_trajectory_ended(self, account: KvAccount) -> None:
        if not account.num_leases:  # a trajectory that was aborted before it began
            return
        tokens = _count_response_tokens(account)
        self._length_stats.survival.add_ended(self._assumed_alive_until.pop(account.trajectory_id, 0), tokens)
        self._update_expected_tokens(account, float(tokens))
        del self._expected_tokens[account.trajectory_id]

    def estimate_turn_tokens(self, account: KvAccount, quantile: float) -> int:
        turn_tokens = account.tokens - account.turn_start_tokens
        return self._length_stats.estimate_turn_tokens(account.request.turn, turn_tokens, quantile)

    def estimate_final_tokens(self, account: KvAccount) -> float:
        prompt = account.request.prompt_tokens
        return prompt + self._length_stats.estimate_final_tokens(account.group_id, account.tokens - prompt)

    def survival_curve(self, account: KvAccount) -> NDArray[np.float64]:
        return self._length_stats.survival_curve(account.group_id, _count_response_tokens(account))

    def _update_expected_tokens(self, account: KvAccount, tokens: float) -> None:
        self._length_stats.update_expected_tokens(
            account.group_id, self._expected_tokens.get(account.trajectory_id), tokens
        )
        self._expected_tokens[account.trajectory_id] = tokens


def _count_response_tokens(account: KvAccount) -> int:
    return account.tokens - account.request.prompt_tokens
