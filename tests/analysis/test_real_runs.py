"""Reports and simulations of real runs: with small caches, aborted groups and a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.cli.report_command import report_run
from actors.cli.simulate_command import SimulateOptions, simulate_workload
from analysis.simulation.recorded_workload import load_recorded_step
from analysis.simulation.simulate import simulate
from analysis.utilization.log_schema import read_log_tables
from analysis.utilization.report import Utilization, compute_utilization
from bus.codec import decode
from bus.event_log.reader import read_events
from bus.messages import AnyMessage, TrajectoryAborted, TrajectoryFinished
from configs.run_folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("tiny.num_train_questions=64", "tiny.num_test_questions=16", "tiny.num_sft_dialogues=4800", "sft.batch_size=32"),
    *("rl.steps=2", "rl.prompts=8", "rl.rollouts=16", "learner.threads=1", "learner.checkpoint_every=1"),
    *("evaluation.questions=0", "sandbox.backend=process", "engine.num_engines=2"),
)
SMALL = "engine.kv_tokens=1100"  # two engines hold a third of a step's 128 trajectories
PATIENCE_S = 240.0


def start(runs: Path, *settings: str, resume: bool = False) -> subprocess.Popen[str]:
    overrides = [part for each in (*SETTINGS, f"runs_folder={runs}", *settings) for part in ("--set", each)]
    argv = [
        sys.executable,
        "-m",
        "actors.cli.main",
        "run",
        "configs/tiny.toml",
        *overrides,
        *(["--resume"] if resume else []),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == 0, output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with small caches; its cold start is long enough for calls and some correct answers."""
    runs = tmp_path_factory.mktemp("runs")
    finish(start(runs, "sft.steps=150", SMALL))
    return RunFolder(runs / "demo")


def start_settings(trained: RunFolder) -> Sequence[str]:
    """Settings of a run with the checkpoint and the questions of `trained`."""
    data = (f"data.{name}={trained.data / f'{name}.jsonl'}" for name in ("train", "test"))
    return ("sft.steps=0", f"model.checkpoint={trained.get_checkpoint_path(0)}", *data)


def messages(folder: RunFolder, log: str, *kinds: str) -> list[AnyMessage]:
    return [decode(event.frame).message for event, _ in read_events(folder.events / f"{log}.sqlite", kinds=kinds)]


def reported(folder: RunFolder) -> tuple[Utilization, str]:
    """The report's data and its output."""
    console = Console(width=100, file=StringIO())
    report_run(folder.path, json=False, console=console)
    assert folder.utilization_plot.read_bytes().startswith(b"\x89PNG")
    return compute_utilization(folder.logs), console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def simulated(folder: RunFolder, **changes: Any) -> str:
    console = Console(width=140, file=StringIO())
    simulate_workload(SimulateOptions(str(folder.path), "static,kv_lookahead", **changes), console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_simulated_recorded_step_has_the_same_trajectories_and_a_similar_duration(trained: RunFolder) -> None:
    """Within 25% on a busy machine; `python -m benchmarks.validation` measures it."""
    predicted_s = measured_s = 0.0
    for number in (1, 2):
        step = load_recorded_step(trained, number)
        outcome = simulate(step.workload, step.cluster, step.policy)
        ended = [
            each for each in messages(trained, "head", "TrajectoryFinished") if isinstance(each, TrajectoryFinished)
        ]
        assert step.left_out == 0
        assert outcome.generated_tokens == sum(plan.generated_tokens for plan in step.workload.plans)
        assert {plan.generated_tokens for plan in step.workload.plans} <= {sum(each.loss_mask) for each in ended}
        assert outcome.waits_s["lease to begin"] > 0
        assert outcome.evictions == outcome.preemptions == 0
        predicted_s += outcome.makespan_s
        measured_s += step.measured_s
    assert predicted_s == pytest.approx(measured_s, rel=0.25)


def test_simulate_compares_policies_with_the_measured_makespan(trained: RunFolder, tmp_path: Path) -> None:
    output = simulated(trained, json_file=tmp_path / "step.json", run=tmp_path / "simulated")
    assert "step 2 of demo on the recorded engines" in output
    assert "measured makespan" in output
    ours = {each["policy"]: each for each in json.loads((tmp_path / "step.json").read_bytes())}
    assert ours["static"]["measured_s"] is None
    assert ours["kv_lookahead"]["measured_s"] == load_recorded_step(trained).measured_s
    use, _ = reported(RunFolder(tmp_path / "simulated" / "kv_lookahead"))
    assert use.trajectories.generated_tokens == ours["kv_lookahead"]["generated_tokens"]
    assert use.doubts == ()


def test_aborted_trajectories_are_reported(trained: RunFolder) -> None:
    runs = trained.path.parent
    more = ("name=aborting", "rl.prompts=1", "rl.group_oversampling=12", "rl.surplus_groups=abort", SMALL)
    finish(start(runs, *start_settings(trained), *more))
    folder = RunFolder(runs / "aborting")
    use, shown = reported(folder)
    finished = [each for each in messages(folder, "head", "TrajectoryFinished") if isinstance(each, TrajectoryFinished)]
    aborted = [each for each in messages(folder, "head", "TrajectoryAborted") if isinstance(each, TrajectoryAborted)]
    assert use.trajectories.aborted == len(aborted) > 0
    assert f"{len(aborted)} were aborted" in shown
    assert use.trajectories.started == use.trajectories.ended == len(finished) + len(aborted)
    assert use.trajectories.failed == 0
    generated = sum(each.generated_tokens for each in use.engines)
    assert use.trajectories.generated_tokens == pytest.approx(generated, rel=0.01)
    for step in use.steps:
        assert step.last is not None
        assert step.last.ending != "aborted"
    assert use.doubts == ()
    assert f"{load_recorded_step(folder).left_out} failed or aborted trajectories are excluded" in simulated(folder)


def test_a_killed_run_is_reported_before_and_after_its_resume(trained: RunFolder) -> None:
    runs = trained.path.parent
    folder = RunFolder(runs / "killed")
    settings = (*start_settings(trained), "name=killed", SMALL)
    process = start(runs, *settings)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while (
            not folder.get_checkpoint_path(1).exists() or len(_ends(folder)) < 160
        ):  # in the middle of the second step
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the second step has not started"
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    before, shown = reported(folder)
    assert before.trajectories.ended >= 128
    assert before.trajectories.started is not None
    assert before.trajectories.started > before.trajectories.ended
    assert any("the others were abandoned" in doubt for doubt in before.doubts)
    assert "doubt:" in shown
    assert before.steps[-1].step_s is None
    simulated(folder, step=1)
    finish(start(runs, *settings, resume=True))
    after, _ = reported(folder)
    assert [step.name for step in after.steps if step.step_s is not None] == ["step 1", "step 2"]
    assert after.trajectories.ended >= before.trajectories.ended + 128
    began = read_log_tables(folder.logs).frames["engine.started"]["t"].sort()
    down_s = began[2] - before.span_s
    for engine in after.engines:
        assert engine.busy_s + engine.idle_s == pytest.approx(engine.active_s)
        assert engine.active_s + engine.starting_s <= after.span_s - began[0] - down_s + 0.01
    simulated(folder, step=2)


def _ends(folder: RunFolder) -> list[str]:
    path = folder.logs / "rollout-0.jsonl"
    return [line for line in path.read_text().splitlines() if '"trajectory.ended"' in line] if path.exists() else []
