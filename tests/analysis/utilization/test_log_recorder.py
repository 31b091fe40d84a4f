"""A recording in virtual time is read like a real run's logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.simulation.log_recorder import LogRecorder
from analysis.utilization.report import compute_utilization
from bus.messages import (
    AnyMessage,
    CodeFinished,
    CodeOk,
    CodeRequested,
    EngineLoadReported,
    LeaseGranted,
    LeasePaused,
    LeaseReleased,
    LeaseRequested,
    LedgerReported,
    Output,
    StartGroup,
    TrajectoryFailed,
    TurnGenerated,
    TurnRequested,
)
from policies.decider import Send
from tests.fakes import generated


def load(t: float, tokens: int) -> EngineLoadReported:
    return EngineLoadReported("generator-0", 0, 1, 0, 80, 20, tokens, tokens, 9, 0, 0, 0, t)


def test_a_recording_replaces_an_earlier_one(tmp_path: Path) -> None:
    for engine in ("generator-1", "generator-0"):
        recording = LogRecorder(tmp_path)
        recording.on_engine_started(0, engine, 100, 10)
        recording.close(1)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["executor-0", "generator-0", "head", "rollout-0"]


def test_waits_tokens_calls_and_leases_of_a_recording_are_reported(tmp_path: Path) -> None:
    recording = LogRecorder(tmp_path / "logs")

    def decided(t: float, event: AnyMessage, *effects: AnyMessage, to: str = "head/arbiter") -> None:
        recording.on_rollout_decision(t, event, [Send(to, effect) for effect in effects])

    def turn(number: int) -> TurnRequested:
        return TurnRequested(0, number, 1, b"", 9, 1.0, 1.0, 0, (), 0)

    recording.on_engine_started(0, "generator-0", 100, 10)
    group = StartGroup(0, "train", "q", "2", b"1234", 1, 0, 1.0, 0)
    decided(0, group, LeaseRequested(0, 0, 0, 1, 1, 1, 9))
    decided(1, LeaseGranted(0, "generator-0", 10, 1, 1.0, "room"), turn(0), to="generator-0")
    turn_message: TurnGenerated = generated(0, 0, "abcd")
    recording.on_engine_load(3, load(2.0, 5))
    recording.on_ledger_reported(3, LedgerReported("generator-0", 60, 100, 1, 0, 0, 80))
    decided(3, turn_message, CodeRequested(0, 0, "jupyter_code", "1", ""), LeasePaused(0, 6))
    decided(8, CodeFinished(0, 0, CodeOk(Output()), 5.0, "executor-0/1"), LeaseRequested(0, 0, 1, 2, 8, 1, 2))
    decided(10, turn_message, LeaseReleased(0, 8), TrajectoryFailed(0, 0, "engine: gone"))
    recording.close(10)

    use = compute_utilization(tmp_path / "logs")
    trajectories = use.trajectories
    assert [wait.total_s for wait in trajectories.waits.values()] == pytest.approx([1 + 2, 2, 5, 0])
    assert (trajectories.started, trajectories.ended, trajectories.failed, trajectories.calls, trajectories.tokens) == (
        1,
        1,
        1,
        1,
        8,
    )
    assert trajectories.longest[0].cause == "engine: gone"
    (engine,) = use.engines
    assert (engine.generated_tokens, engine.kv_tokens, engine.leased_tokens_peak) == (5, 100, 60)
    assert engine.idle_by_cause_s == pytest.approx({"lease": 1 + 2, "tools": 5})
    assert (engine.busy_s, engine.active_s) == pytest.approx((2, 10))
    (executor,) = use.executors
    assert executor.busy_s == pytest.approx(5)
    running = use.timeline.executors["executor-0"]["running"]
    assert sum(running) * use.timeline.bin_s == pytest.approx(5, rel=0.02)
    (step,) = use.steps
    assert step.step_s == pytest.approx(10)
    assert step.why.startswith("1 call took 5.00 s")
