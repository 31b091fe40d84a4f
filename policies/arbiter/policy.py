"""The interface between the arbiter and its policies."""

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asterism.policies.arbiter.kv_ledger import EngineAccount, KvAccount


class Grant(msgspec.Struct, frozen=True):
    """A decision to lease `tokens` KV tokens in total on `engine`, after evicting the caches in `to_evict`."""

    account: KvAccount
    engine: EngineAccount
    tokens: int
    reason: str
    to_evict: tuple[KvAccount, ...] = ()


class Preemption(msgspec.Struct, frozen=True):
    """A decision to evict the cache of a waiting trajectory, which keeps waiting."""

    account: KvAccount
    reason: str


class Policy(Protocol):
    """Receives every change of the ledger. The arbiter calls `decide_next` until it returns None."""

    may_oversell: bool
    batches_arrivals: bool
    """Whether a new trajectory waits for the other requests of the same moment."""

    def on_waiting(self, account: KvAccount) -> None:
        """Add a trajectory that requested a lease, or that lost its cache while it waited."""
        ...

    def on_withdrawn(self, account: KvAccount) -> None:
        """Remove a trajectory that no longer waits: it was granted a lease, or has ended."""
        ...

    def on_load_reported(self, engine: EngineAccount) -> None: ...

    def on_capacity_changed(self, engine: EngineAccount) -> None:
        """Note that the engine joined, or that pages on the engine may have become free."""
        ...

    def on_leased(self, account: KvAccount) -> None: ...

    def on_pages_released(self, account: KvAccount, engine: EngineAccount) -> None:
        """Note that the trajectory has no cache on `engine` any more."""
        ...

    def on_ended(self, account: KvAccount) -> None: ...

    def on_engine_left(self, engine: EngineAccount) -> None: ...

    def decide_next(self, now: float) -> Grant | Preemption | None: ...

    def get_wait_reason(self, account: KvAccount) -> str:
        """Return why the waiting request was not granted immediately."""
        ...


class LengthForecast(Protocol):
    """A forecast of lengths, learned or by an oracle. `limit`: maximum number of new tokens of a trajectory."""

    limit: int

    def estimate_turn_tokens(self, account: KvAccount, quantile: float) -> int:
        """Return the `quantile` of the total new tokens of the trajectory's current turn."""
        ...

    def estimate_final_tokens(self, account: KvAccount) -> float:
        """Return the trajectory's expected tokens at its end, prompt included."""
        ...

    def survival_curve(self, account: KvAccount) -> NDArray[np.float64]:
        """Return the probability that the trajectory continues beyond the start of each interval, [NUM_BINS]."""
        ...
