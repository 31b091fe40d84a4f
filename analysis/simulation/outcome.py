"""What came of a simulated step."""

from __future__ import annotations

from typing import Literal

import msgspec

from analysis.simulation.bounds import Bounds
from policies.scheduling import PolicyName

Policy = PolicyName | Literal["oracle"]  # kv_lookahead with the true lengths known


class Sample(msgspec.Struct, frozen=True):
    """All engines together, at a moment."""

    at_s: float
    running: int
    waiting: int  # at engines
    used_tokens: int
    live: int  # trajectories that have not ended
    leasing: int  # of them those that wait for a lease
    calling: int  # and those that wait for their tools


class Tail(msgspec.Struct, frozen=True):
    """The trajectories that ended last: a hundredth of them. Means, in seconds; `first_end_s` of the earliest of them."""

    trajectories: int
    began_s: float  # when they got their first lease
    first_end_s: float
    last_end_s: float
    waited_s: float  # for leases
    tokens: float  # at their ends


class Outcome(msgspec.Struct, frozen=True):
    """Times are virtual seconds, but for those of decisions and `simulated_in_s`: the host's CPU seconds."""

    workload: str
    cluster: str
    policy: Policy
    seed: int
    makespan_s: float
    bounds: Bounds
    trajectories: int
    failed: int
    generated_tokens: int
    slots: int  # decode slots of all engines
    kv_tokens: int  # that all engines hold
    kv_utilization: float  # mean share of all engines' pages that are not free, until the end
    slot_utilization: float  # mean share of all engines' decode slots (max_running) in use, until the end
    most_kv: float  # the fullest that an engine was, as a share of its pages
    waits_s: dict[str, float]  # summed over trajectories, by cause
    evictions: int
    evicted_tokens: int
    preemptions: int
    overflows: int  # times that an engine had to make room by itself
    prefilled_tokens: int
    recomputed_tokens: int
    migrations: int
    leases: int
    tail: Tail
    decisions: int
    decision_s: float  # mean
    simulated_in_s: float
    timeline: tuple[Sample, ...]
    measured_s: float | None = None  # of a recorded step under the policy that it had: how long it really took

    @property
    def decisions_per_s(self) -> float:
        return 1 / self.decision_s
