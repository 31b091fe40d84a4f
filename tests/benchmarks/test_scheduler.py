"""What `python -m benchmarks.scheduler` makes of its outcomes."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from analysis.simulation.cluster_model import H100, QWEN3_14B, build_cluster
from analysis.simulation.outcome import SimulatedPolicy, SimulationOutcome
from analysis.simulation.simulate import simulate
from analysis.simulation.workload import WorkloadShape, draw_workload
from benchmarks.scheduler import OURS, compute_ratios, extract_figures, summarize_speed
from benchmarks.support import decision_replay as _decisions
from benchmarks.support.decision_replay import DecisionRecorder, DecisionSpeed
from bus.messages import AnyMessage, EngineJoined, EngineLeft
from policies.arbiter.arbiter import Arbiter
from policies.decider import Send

RESPONSE = 600
STEP = (
    draw_workload(WorkloadShape("report", 2, 2, 200.0, 0.5, 0.5, 1.0, response_tokens=RESPONSE), 0),
    build_cluster(QWEN3_14B, H100, 2),
)


@cache
def outcome(policy: SimulatedPolicy) -> SimulationOutcome:
    return simulate(*STEP, policy)


def test_the_result_has_the_documented_keys() -> None:
    keys = ("makespan_s", "lower_bound_s", "kv_utilization", "slot_utilization", "evictions", "recomputed_tokens")
    assert tuple(extract_figures(outcome("static")))[: len(keys)] == keys


def test_a_policy_that_takes_twice_as_long_as_ours_is_at_two() -> None:
    slow = replace(outcome("static"), makespan_s=2 * outcome(OURS).makespan_s)
    assert compute_ratios({"static": slow, OURS: outcome(OURS)}) == {"static": 2.0}


def test_the_speed_is_that_of_our_decisions_in_all_workloads() -> None:
    one = DecisionSpeed(decisions=100, live_trajectories=40, engines=2, decided_s=1e-3, worst_s=2e-4)
    other = DecisionSpeed(decisions=300, live_trajectories=16, engines=8, decided_s=9e-3, worst_s=5e-4)
    found = summarize_speed([one, other])
    assert found == {"decisions_per_s": 40_000, "worst_decision_ms": 0.5, "live_trajectories": 40, "engines": 8}


def test_workloads_that_were_not_run_have_no_speed() -> None:
    assert set(summarize_speed([]).values()) == {None}


def decisions() -> DecisionRecorder:
    """Of the arbiter in that step."""
    made = DecisionRecorder()
    simulate(*STEP, OURS, observe=made.on_decision)
    return made


def test_a_replay_repeats_all_decisions() -> None:
    found = decisions().measure_speed(lambda: Arbiter(OURS, RESPONSE))
    assert (found.decisions, found.live_trajectories, found.engines) == (outcome(OURS).decisions, 4, 2)


def test_a_replay_with_other_decisions_is_detected() -> None:
    with pytest.raises(AssertionError, match=r"decision \d+, LeaseRequested"):
        decisions().measure_speed(lambda: Arbiter("worst_case", RESPONSE))


class Clock:
    """A fake wall and thread clock; each decision takes the next of `took_s`."""

    def __init__(self, took_s: list[float]) -> None:
        self.took_s = took_s
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def decide(self, now: float, event: AnyMessage) -> list[Send]:
        self.now += self.took_s.pop(0)
        return []

    def get_state_after(self, event: AnyMessage) -> None: ...


def test_the_worst_decision_is_at_its_fastest_and_all_together_are_the_median_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock([1.0, 9.0, 5.0, 2.0, 6.0, 3.0])
    monkeypatch.setattr(_decisions, "time", clock)
    made = DecisionRecorder()
    for event in (EngineJoined("generator-0", 64, 1, 0), EngineLeft("generator-0", "gone")):
        made.on_decision(0.0, event, [])
    found = made.measure_speed(lambda: clock)
    assert (found.worst_s, found.decided_s) == (2.0, 9.0)
