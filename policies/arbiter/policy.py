"""The interface between the arbiter and its policies."""

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from asterism.policies.arbiter.kv_ledger import EngineAccount, KvAccount


class Grant(msgspec.Struct, frozen=True):
    """Lease `tokens` KV tokens in total on `engine`, after evicting the caches in `to_evict`."""

    account: KvAccount
    engine: EngineAccount
    tokens: int
    reason: str
    to_evict: tuple[KvAccount, ...] = ()


class Preemption(msgspec.Struct, frozen=True):
    """Evict the cache of a waiting trajectory; it keeps waiting."""

    account: KvAccount
    reason: str


class Policy(Protocol):
    """Receives every change of the ledger; `decide_next` is called until it returns None."""

    may_oversell: bool
    batches_arrivals: bool
    """Whether a new trajectory waits for the other requests that are made at the same time."""

    def on_waiting(self, account: KvAccount) -> None:
        """The trajectory requested a lease, or lost its cache while it waited."""
        ...

    def on_withdrawn(self, account: KvAccount) -> None:
        """The trajectory no longer waits: it was granted a lease, or has ended."""
        ...

    def on_load_reported(self, engine: EngineAccount) -> None: ...

    def on_capacity_changed(self, engine: EngineAccount) -> None:
        """The engine joined, or pages there may have become free."""
        ...

    def on_leased(self, account: KvAccount) -> None: ...

    def on_pages_released(self, account: KvAccount, engine: EngineAccount) -> None:
        """The trajectory has no cache on `engine` any more."""
        ...

    def on_ended(self, account: KvAccount) -> None: ...

    def on_engine_left(self, engine: EngineAccount) -> None: ...

    def decide_next(self, now: float) -> Grant | Preemption | None: ...

    def get_wait_reason(self, account: KvAccount) -> str:
        """What a request that was not granted immediately waits for."""
        ...


class LengthForecast(Protocol):
    """Lengths as learned or by an oracle. `limit`: maximum of new tokens of a trajectory."""

    limit: int

    def estimate_turn_tokens(self, account: KvAccount, quantile: float) -> int:
        """The `quantile` of the new tokens of the trajectory's current turn, in total."""
        ...

    def estimate_final_tokens(self, account: KvAccount) -> float:
        """The trajectory's expected tokens at its end, prompt included."""
        ...

    def survival_curve(self, account: KvAccount) -> NDArray[np.float64]:
        """The probability that it continues beyond the start of each interval of the forecast."""
        ...
