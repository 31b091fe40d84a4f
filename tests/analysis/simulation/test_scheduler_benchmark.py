"""What `python -m benchmarks.scheduler` makes of its outcomes."""

from __future__ import annotations

from functools import cache

import pytest
from msgspec.structs import replace

from analysis.simulation.model import H100, QWEN3_14B, cluster_of
from analysis.simulation.outcome import Outcome, Policy
from analysis.simulation.run import simulate
from analysis.simulation.workload import Shape, draw
from benchmarks import _decisions
from benchmarks._decisions import Decisions, Speed
from benchmarks.scheduler import OURS, figures, ratios, speed
from bus.messages import AnyMessage, EngineJoined, EngineLeft
from policies.arbiter import Arbiter
from policies.decider import Send

RESPONSE = 600
STEP = (
    draw(Shape("report", 2, 2, 200.0, 0.5, 0.5, 1.0, response_tokens=RESPONSE), 0),
    cluster_of(QWEN3_14B, H100, 2),
)


@cache
def outcome(policy: Policy) -> Outcome:
    return simulate(*STEP, policy)


def test_the_keys_are_those_that_are_promised() -> None:
    keys = ("makespan_s", "lower_bound_s", "kv_utilization", "slot_utilization", "evictions", "recomputed_tokens")
    assert tuple(figures(outcome("static")))[: len(keys)] == keys


def test_a_policy_that_takes_twice_as_long_as_ours_is_at_two() -> None:
    slow = replace(outcome("static"), makespan_s=2 * outcome(OURS).makespan_s)
    assert ratios({"static": slow, OURS: outcome(OURS)}) == {"static": 2.0}


def test_the_speed_is_that_of_our_decisions_in_all_workloads() -> None:
    one = Speed(decisions=100, live_trajectories=40, engines=2, decided_s=1e-3, worst_s=2e-4)
    other = Speed(decisions=300, live_trajectories=16, engines=8, decided_s=9e-3, worst_s=5e-4)
    found = speed([one, other])
    assert found == {"decisions_per_s": 40_000, "worst_decision_ms": 0.5, "live_trajectories": 40, "engines": 8}


def test_what_was_not_run_has_no_speed() -> None:
    assert set(speed([]).values()) == {None}


def decisions() -> Decisions:
    """Of the arbiter in that step."""
    made = Decisions()
    simulate(*STEP, OURS, observe=made.saw)
    return made


def test_what_was_decided_is_decided_again() -> None:
    found = decisions().speed(lambda: Arbiter(OURS, RESPONSE))
    assert (found.decisions, found.live_trajectories, found.engines) == (outcome(OURS).decisions, 4, 2)


def test_a_replay_that_decides_otherwise_is_found() -> None:
    with pytest.raises(AssertionError, match=r"decision \d+, LeaseRequested"):
        decisions().speed(lambda: Arbiter("kv", RESPONSE))


class Clock:
    """Of both kinds; each decision takes what it says."""

    def __init__(self, took_s: list[float]) -> None:
        self.took_s = took_s
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = perf_counter

    def decide(self, now: float, event: AnyMessage) -> list[Send]:
        self.now += self.took_s.pop(0)
        return []

    def state_after(self, event: AnyMessage) -> None: ...


def test_the_worst_decision_is_at_its_fastest_and_all_together_are_the_median_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock([1.0, 9.0, 5.0, 2.0, 6.0, 3.0])
    monkeypatch.setattr(_decisions, "time", clock)
    made = Decisions()
    for event in (EngineJoined("generator-0", 64, 1, 0), EngineLeft("generator-0", "gone")):
        made.saw(0.0, event, [])
    found = made.speed(lambda: clock)
    assert (found.worst_s, found.decided_s) == (2.0, 9.0)
