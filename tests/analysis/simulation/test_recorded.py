"""A run's event logs, read back as a workload and a cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from analysis.simulation.model import H100, QWEN3_14B, cluster_of
from analysis.simulation.recorded import recorded_cluster, recorded_workload
from analysis.simulation.run import LATENCY_S, Simulation, simulate
from analysis.simulation.workload import Plan, Shape, draw
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import AnyMessage, EngineJoined, Envelope

SHAPE = Shape("test", 2, 3, 300.0, 0.5, 0.8, 1.5, prompt_tokens=90.0, response_tokens=700, result_tokens=40.0)
WORKLOAD = draw(SHAPE, 11)
CLUSTER = msgspec.structs.replace(cluster_of(QWEN3_14B, H100, 1), kv_tokens=4096)


class Recorded(Simulation):
    """Writes down what its deciders hear."""

    def __init__(self, folder: Path) -> None:
        super().__init__(WORKLOAD, CLUSTER, "kv_lookahead")
        self._logs = {name: EventLog(folder / f"{name}.sqlite") for name in ("rollout-0", "head")}

    def _append(self, log: str, message: AnyMessage) -> None:
        frame = encode(Envelope("someone", log, message))
        self._logs[log].append(self.now, log, "someone", type(message).__name__, None, frame)

    def _decide_rollout(self, message: AnyMessage) -> None:
        self._append("rollout-0", message)
        super()._decide_rollout(message)

    def _decide_arbiter(self, message: AnyMessage) -> None:
        self._append("head", message)
        super()._decide_arbiter(message)

    def _collect(self, message: AnyMessage) -> None:
        self._append("head", message)
        super()._collect(message)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events")
    recorded = Recorded(folder)
    recorded.run()
    recorded.close()
    return folder


def shape_of(plan: Plan) -> tuple[object, ...]:
    """All but when tools answer, and what the last turn would have said beyond the limit."""
    turns = [(turn.tokens, turn.result_tokens) for turn in plan.turns]
    return plan.group_id, plan.prompt_tokens, plan.final_tokens, plan.generated_tokens, len(turns), turns[:-1]


def test_a_recorded_run_is_the_workload_that_it_ran(folder: Path) -> None:
    read = recorded_workload(folder / "rollout-0.sqlite", folder / "head.sqlite", response_tokens=700)
    assert [shape_of(plan) for plan in read.plans] == [shape_of(plan) for plan in WORKLOAD.plans]
    for plan, known in zip(read.plans, WORKLOAD.plans, strict=True):
        for turn, other in zip(plan.turns[:-1], known.turns[:-1], strict=True):
            assert turn.tool_s == pytest.approx(other.tool_s + 2 * LATENCY_S)


def test_it_is_predicted_to_take_as_long_as_it_took(folder: Path) -> None:
    read = recorded_workload(folder / "rollout-0.sqlite", folder / "head.sqlite", response_tokens=700)
    again = simulate(read, CLUSTER, "kv_lookahead")
    assert again.makespan_s == pytest.approx(simulate(WORKLOAD, CLUSTER, "kv_lookahead").makespan_s, rel=0.01)


def test_a_recorded_run_s_engines_are_the_cluster_that_it_had(folder: Path) -> None:
    cluster = recorded_cluster(folder / "head.sqlite")
    assert (cluster.engines, cluster.kv_tokens, cluster.page_tokens) == (1, 4096, 16)
    expected = CLUSTER.cost.step_s(4, 1500)
    assert cluster.cost.step_s(4, 1500) == pytest.approx(expected, rel=0.05)


def test_what_was_started_at_another_time_is_left_out(folder: Path) -> None:
    logs = folder / "rollout-0.sqlite", folder / "head.sqlite"
    assert recorded_workload(*logs, response_tokens=700, since=1.0).plans == ()


def test_engines_that_differ_are_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "head.sqlite")
    for number, kv_tokens in enumerate((4096, 8192)):
        joined = EngineJoined(f"generator-{number}", kv_tokens, 16, 0)
        log.append(0.0, "head/arbiter", joined.engine, "EngineJoined", None, encode(Envelope("g", "a", joined)))
    log.close()
    with pytest.raises(ValueError, match="not one and the same"):
        recorded_cluster(tmp_path / "head.sqlite")
