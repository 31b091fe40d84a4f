"""A workload and a cluster are restored from the event logs of a run."""

import shutil
from pathlib import Path

import msgspec
import pytest

from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.simulation.cluster_model import H100, QWEN3_14B, build_cluster
from asterism.analysis.simulation.recorded_workload import load_recorded_step
from asterism.analysis.simulation.simulate import Simulation, simulate
from asterism.analysis.simulation.workload import TrajectoryPlan, WorkloadShape, draw_workload
from asterism.bus import messages as msg
from asterism.bus.codec import decode, encode
from asterism.bus.event_log.reader import read_events
from asterism.bus.event_log.writer import EventLog
from asterism.configs.errors import UnusableInput
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import RlConfig, RocConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig

SHAPE = WorkloadShape("test", 2, 3, 300.0, 0.5, 0.8, 1.5, prompt_tokens=90.0, response_tokens=700, result_tokens=40.0)
WORKLOAD = msgspec.structs.replace(draw_workload(SHAPE, 11), started_after={1: 0})
CLUSTER = msgspec.structs.replace(build_cluster(QWEN3_14B, H100, 1), kv_tokens=4096)


class Recorded(Simulation):
    """A simulation that logs the messages to its deciders."""

    def __init__(self, folder: Path) -> None:
        super().__init__(WORKLOAD, CLUSTER, "kv_lookahead")
        self._logs = {name: EventLog(folder / f"{name}.sqlite") for name in ("rollout-0", "head")}
        self._append("head", msg.StepRequested(3, 2))

    def _append(self, log: str, message: msg.AnyMessage) -> None:
        frame = encode(msg.Envelope("someone", log, message))
        self._logs[log].append(self.timeline.now, log, "someone", type(message).__name__, None, frame)

    def _decide_rollout(self, message: msg.AnyMessage) -> None:
        self._append("rollout-0", message)
        super()._decide_rollout(message)

    def _decide_arbiter(self, message: msg.AnyMessage) -> None:
        self._append("head", message)
        super()._decide_arbiter(message)

    def _collect(self, message: msg.AnyMessage) -> None:
        self._append("head", message)
        super()._collect(message)

    def close(self) -> None:
        self._append("head", msg.StepCollected(3, 0, msg.StepCounts(), {}, msg.BufferCursor()))
        self._append("head", msg.StepRequested(4, 3))
        for log in self._logs.values():
            log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunFolder(tmp_path_factory.mktemp("run"))
    dialogue, engine = (
        DialogueConfig(prompt_tokens=300, response_tokens=700),
        EngineConfig(kv_tokens=4096, max_running=512),
    )
    write_resolved(RunConfig(name="recorded", dialogue=dialogue, engine=engine), run.config)
    recorded = Recorded(run.events)
    recorded.run()
    recorded.close()
    return run.events


def shape_of(plan: TrajectoryPlan) -> tuple[object, ...]:
    """Return the recorded values of the plan: no times of tools, and no tokens of the last turn beyond the limit."""
    turns = [(turn.tokens, turn.result_tokens) for turn in plan.turns]
    return plan.group_id, plan.prompt_tokens, plan.final_tokens, plan.generated_tokens, len(turns), turns[:-1]


def test_the_workload_of_a_recorded_run_is_restored(folder: Path) -> None:
    read = load_recorded_step(RunFolder(folder.parent)).workload
    assert [shape_of(plan) for plan in read.plans] == [shape_of(plan) for plan in WORKLOAD.plans]
    for plan, known in zip(read.plans, WORKLOAD.plans, strict=True):
        for turn, other in zip(plan.turns[:-1], known.turns[:-1], strict=True):
            assert turn.tool_s == pytest.approx(other.tool_s)


def test_a_recorded_step_has_its_cluster_policy_and_makespan(folder: Path) -> None:
    step = load_recorded_step(RunFolder(folder.parent))
    cluster = step.cluster
    assert (step.step, step.policy, step.left_out) == (3, "kv_lookahead", 0)
    assert (cluster.engines, cluster.kv_tokens, cluster.page_tokens) == (1, 4096, 16)
    assert (cluster.max_running, cluster.chunk_tokens) == (512, 512)
    assert cluster.latency_s == pytest.approx(CLUSTER.latency_s)
    assert cluster.cost.compute_step_s(4, 1500) == pytest.approx(CLUSTER.cost.compute_step_s(4, 1500), rel=0.05)
    expected = simulate(WORKLOAD, CLUSTER, "kv_lookahead").makespan_s
    assert step.measured_s == pytest.approx(expected, rel=0.01)
    assert simulate(step.workload, CLUSTER, step.policy).makespan_s == pytest.approx(expected, rel=0.01)
    assert simulate(step.workload, step.cluster, step.policy).makespan_s == pytest.approx(expected, rel=0.05)


def test_a_step_that_overlaps_others_is_marked(folder: Path, tmp_path: Path) -> None:
    ahead = RunFolder(tmp_path)
    dialogue, rl = (
        DialogueConfig(prompt_tokens=300, response_tokens=700),
        RlConfig(prompts=8, rollouts=2, max_staleness=1),
    )
    write_resolved(RunConfig(name="ahead", dialogue=dialogue, rl=rl, roc=RocConfig(enabled=False)), ahead.config)
    ahead.events.symlink_to(folder)
    assert load_recorded_step(ahead).overlaps
    assert not load_recorded_step(RunFolder(folder.parent)).overlaps


def test_a_replacement_group_starts_when_the_replaced_group_ends(folder: Path) -> None:
    logs = folder / "rollout-0.sqlite", folder / "head.sqlite"
    assert load_recorded_step(RunFolder(folder.parent)).workload.started_after == {1: 0}
    messages = [(event.time, decode(event.frame).message) for event, _ in read_events(logs[0])]
    begun = {each.group_id: at for at, each in messages if isinstance(each, msg.StartGroup)}
    collected = [(event.time, decode(event.frame).message) for event, _ in read_events(logs[1])]
    ends = [at for at, each in collected if isinstance(each, msg.TrajectoryFinished) and each.group_id == 0]
    assert begun == {0: 0.0, 1: pytest.approx(max(ends) + CLUSTER.latency_s)}


def test_a_run_without_a_complete_step_is_refused_with_the_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AnalysisError, match=r"head.sqlite: step 4 was not collected; collected steps: 3"):
        load_recorded_step(RunFolder(folder.parent), 4)
    run = RunFolder(tmp_path)
    with pytest.raises(UnusableInput, match=r"config.toml: cannot be read"):
        load_recorded_step(run)
    write_resolved(RunConfig(name="unrecorded"), run.config)
    with pytest.raises(AnalysisError, match=r"head.sqlite: no such event log; .* log.events = false"):
        load_recorded_step(run)
    run.events.mkdir()
    (run.events / "head.sqlite").write_text("no database" * 100)
    with pytest.raises(AnalysisError, match=r"head.sqlite: cannot be read as an event log"):
        load_recorded_step(run)
    (run.events / "head.sqlite").unlink()
    EventLog(run.events / "head.sqlite").close()
    with pytest.raises(AnalysisError, match=r"head.sqlite: no training step was collected"):
        load_recorded_step(run)


def test_groups_of_other_steps_are_left_out(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder.parent, tmp_path / "run"))
    append(run, 0.001, msg.StepRequested(4, 3))
    first = load_recorded_step(run).workload
    assert ({plan.group_id for plan in first.plans}, first.started_after) == ({0}, {})
    append(run, 100.0, msg.StepRequested(3, 2))
    with pytest.raises(AnalysisError, match=r"head.sqlite: no trajectory of step 3 ended"):
        load_recorded_step(run)


def append(run: RunFolder, at: float, message: msg.AnyMessage, actor: str = "head") -> None:
    log = EventLog(run.events / "head.sqlite")
    log.append(at, actor, "someone", type(message).__name__, None, encode(msg.Envelope("someone", actor, message)))
    log.close()


def test_engines_of_different_capacity_are_refused(folder: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(folder.parent, tmp_path / "run"))
    append(run, 0.0, msg.EngineJoined("generator-1", 8192, 16, 0), "head/arbiter")
    with pytest.raises(AnalysisError, match="differ in capacity"):
        load_recorded_step(run)
