"""The report on the logs of a simulated step matches the simulation's own measurements."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from asterism.analysis.simulation.cluster_model import H100, QWEN3_14B, build_cluster
from asterism.analysis.simulation.log_recorder import LogRecorder
from asterism.analysis.simulation.outcome import SimulatedPolicy, SimulationOutcome
from asterism.analysis.simulation.simulate import simulate
from asterism.analysis.simulation.workload import WorkloadShape, draw_workload
from asterism.analysis.utilization.report import Utilization, compute_utilization

SHAPE = WorkloadShape("test", 4, 6, 500.0, 0.5, 0.5, 1.5, prompt_tokens=90.0, response_tokens=1500, result_tokens=40.0)
WORKLOAD = draw_workload(SHAPE, 7)
CLUSTER = replace(build_cluster(QWEN3_14B, H100, 2), kv_tokens=2600)


class Reported(NamedTuple):
    outcome: SimulationOutcome
    use: Utilization


@pytest.fixture(scope="module", params=["kv_lookahead", "static"])
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reported]:
    """Simulate a step and report on its logs. With the second policy, the engines evict."""
    policy: SimulatedPolicy = request.param
    logs: Path = tmp_path_factory.mktemp(policy) / "logs"
    yield Reported(simulate(WORKLOAD, CLUSTER, policy, recording=LogRecorder(logs)), compute_utilization(logs))


def about(figure: float) -> object:
    return pytest.approx(figure, rel=0.01)


@pytest.mark.slow
def test_the_report_has_the_engines_counters(reported: Reported) -> None:
    outcome, engines = reported.outcome, reported.use.engines
    assert sum(each.generated_tokens for each in engines) == outcome.generated_tokens
    assert sum(each.prefilled_tokens for each in engines) == outcome.prefilled_tokens
    assert sum(each.recomputed_tokens for each in engines) == outcome.recomputed_tokens
    assert sum(each.evicted_tokens for each in engines) == outcome.evicted_tokens
    assert sum(each.preempted for each in engines) == outcome.preemptions
    assert {each.kv_tokens for each in engines} == {CLUSTER.kv_tokens // 16 * 16}


def test_the_report_has_the_trajectories_and_their_waits(reported: Reported) -> None:
    outcome, told = reported.outcome, reported.use.trajectories
    waits = {name: wait.total_s for name, wait in told.waits.items()}
    assert (told.started, told.ended, told.failed) == (outcome.trajectories, outcome.trajectories, 0)
    assert told.generated_tokens == outcome.generated_tokens
    assert waits["tools_s"] == about(outcome.waits_s["tools"])
    generation = ("engine's queue", "prefill", "decode")
    assert waits["generation_s"] == about(sum(outcome.waits_s[each] for each in generation))
    latency_s = 2 * CLUSTER.latency_s * outcome.leases  # for request and grant, which the arbiter does not measure
    leases = ("lease to begin", "lease after a tool", "lease within a turn")
    assert waits["lease_wait_s"] == about(sum(outcome.waits_s[each] for each in leases) + latency_s)


def test_the_report_has_the_step_and_the_utilization_over_time(reported: Reported) -> None:
    outcome, use = reported.outcome, reported.use
    (step,) = use.steps
    assert step.step_s == about(outcome.makespan_s)
    timeline = use.timeline.engines.values()
    used = sum(sum(each["used"]) for each in timeline) * use.timeline.bin_s / (outcome.kv_tokens * outcome.makespan_s)
    assert used == pytest.approx(outcome.kv_utilization, rel=0.05)  # the timeline has four samples per second
    assert use.doubts == ()
    (executor,) = use.executors
    assert executor.calls == use.trajectories.calls
    assert executor.running_mean * executor.span_s == about(outcome.waits_s["tools"])


def test_a_recording_replaces_an_earlier_recording(tmp_path: Path) -> None:
    for engine in ("generator-1", "generator-0"):
        recording = LogRecorder(tmp_path)
        recording.on_engine_started(0, engine, 100, 10)
        recording.close(1)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["executor-0", "generator-0", "head"]
