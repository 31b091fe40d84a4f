"""The outcome of a simulated step: makespan, waits, utilization, counters and timeline."""

from typing import Literal

import msgspec

from asterism.analysis.simulation.bounds import MakespanBounds
from asterism.policies.arbiter.arbiter import PolicyName

SimulatedPolicy = PolicyName | Literal["oracle"]  # kv_lookahead with the true lengths known


class TimelineSample(msgspec.Struct, frozen=True):
    """The state of all engines together at one time."""

    at_s: float
    running: int
    waiting: int  # sequences that wait at engines
    used_tokens: int
    live: int  # trajectories that have not ended
    leasing: int  # live trajectories that wait for a lease
    calling: int  # live trajectories that wait for tools


class TailStatistics(msgspec.Struct, frozen=True):
    """Means over the last hundredth of the trajectories, in seconds; `first_end_s` is its earliest end."""

    trajectories: int
    began_s: float  # time of the first lease
    first_end_s: float
    last_end_s: float
    waited_s: float  # waiting time for leases
    tokens: float  # final length


class SimulationOutcome(msgspec.Struct, frozen=True):
    """Times are virtual seconds, except `decision_s` and `simulated_in_s`: the host's CPU seconds."""

    workload: str
    cluster: str
    policy: SimulatedPolicy
    seed: int
    makespan_s: float
    bounds: MakespanBounds
    trajectories: int
    failed: int
    generated_tokens: int
    slots: int  # decode slots of all engines
    kv_tokens: int  # capacity of all engines
    kv_utilization: float  # mean share of used pages, over all engines and the makespan
    slot_utilization: float  # mean share of used decode slots (max_running)
    most_kv: float  # highest share of used pages on one engine
    waits_s: dict[str, float]  # summed over trajectories, by cause
    evictions: int
    evicted_tokens: int
    preemptions: int
    overflows: int  # times that an engine ran out of pages
    prefilled_tokens: int
    recomputed_tokens: int
    migrations: int
    leases: int
    tail: TailStatistics
    decisions: int
    decision_s: float  # mean seconds of a decision
    simulated_in_s: float
    timeline: tuple[TimelineSample, ...]
    measured_s: float | None = None  # real makespan of a recorded step under this policy

    @property
    def decisions_per_s(self) -> float:
        return 1 / self.decision_s
