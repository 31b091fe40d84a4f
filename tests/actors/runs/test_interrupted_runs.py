"""Runs restart or end, leave nothing behind, and resume after their processes stop, die or cannot start."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import TrajectoryFailed
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from tests.actors.runs.running import (
    ROOT,
    Start,
    StartedRun,
    finish,
    list_process_ids,
    metrics,
    read_conserved_summary,
    read_log_entries,
    read_messages,
    wait_until_empty,
)
from tests.processes import family, is_running, processes_that_name

pytestmark = pytest.mark.slow


def interrupt_and_check(run: StartedRun, number: signal.Signals) -> int:
    """Send a signal to the launcher; check that all processes end, and return the step that the run saved."""
    children = family(run.process.pid)[1:]
    run.process.send_signal(number)
    output = run.end(130)
    step = list_saved_steps(run.folder.checkpoints)[-1]
    assert f"--resume` continues after step {step}, from {run.folder.get_checkpoint_path(step)}" in output
    assert not [pid for pid in children if is_running(pid)]
    return step


def test_interrupts_save_the_last_trained_step_and_a_resume_continues_the_run(start_trained: Start) -> None:
    """The test ends at the second signal; test_second_signals_... resumes a run to its last step."""
    settings = ("rl.steps=60", "learner.checkpoints.every=1000")  # some steps remain at both signals
    run = start_trained(*settings)
    run.wait_for("step", 2)
    step = interrupt_and_check(run, signal.SIGINT)
    assert step >= 2
    run = start_trained(*settings, "--resume")
    run.wait_for("step", step + 1)
    later_step = interrupt_and_check(run, signal.SIGTERM)
    assert later_step > step
    assert list_saved_steps(run.folder.checkpoints) == [0, step, later_step]
    assert [each["step"] for each in metrics(run.folder, "step")] == list(range(1, later_step + 1))


@pytest.mark.nightly
def test_second_signals_during_the_save_leave_a_run_that_resumes(tmp_path: Path, start_trained: Start) -> None:
    settings = ("rl.steps=8", "learner.checkpoints.every=1000")
    for second in (signal.SIGINT, signal.SIGKILL):
        run = start_trained(*settings, *(["--resume"] if (tmp_path / "demo").exists() else []))
        saved = list_saved_steps(run.folder.checkpoints)
        run.wait_for("step", max(saved, default=0) + 1)
        run.process.send_signal(signal.SIGINT)
        run.wait_until(lambda run=run: any(run.folder.checkpoints.glob(".*")) or run.process.poll() is not None)
        run.process.send_signal(second)
        finish(run.process)
        wait_until_empty(lambda: processes_that_name(str(tmp_path)))
    start_trained(*settings, "--resume").succeed()
    assert [each["step"] for each in metrics(run.folder, "step")] == list(range(1, 9))


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_a_starting_learner_does_not_outlive_the_launcher(
    tmp_path: Path, start_trained: Start, number: signal.Signals
) -> None:
    run = start_trained("learner.ranks=2")  # torchrun starts the ranks
    run.wait_until(
        lambda: any(
            "asterism.engine.learner" in line and "torch.distributed" not in line
            for line in processes_that_name(str(tmp_path))
        )
    )
    run.process.send_signal(number)
    finish(run.process)
    wait_until_empty(lambda: processes_that_name(str(tmp_path)))


@pytest.mark.nightly
def test_a_run_survives_the_kill_of_one_of_two_learner_ranks_and_of_torchrun(
    tmp_path: Path, start_trained: Start
) -> None:
    run = start_trained("learner.ranks=2", "rl.steps=4")
    for step, choose in ((1, lambda torchrun: family(torchrun)[-1]), (2, lambda torchrun: torchrun)):
        run.wait_for("step", step)
        os.kill(choose(list_process_ids(run.folder, "learner")[-1]), signal.SIGKILL)
    run.succeed()
    assert len(list_process_ids(run.folder, "learner")) == 3
    assert [step["step"] for step in metrics(run.folder, "step")] == [1, 2, 3, 4]
    assert not processes_that_name(str(tmp_path))


@pytest.mark.nightly
def test_a_run_that_is_interrupted_during_task_preparation_can_be_resumed(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path)
    run.wait_until((run.folder.data / "train.jsonl").exists)
    run.process.send_signal(signal.SIGINT)
    finish(run.process)
    start(tmp_path, "--resume").succeed()


@pytest.mark.nightly
def test_a_stalled_run_reports_its_waits(start_trained: Start) -> None:
    run = start_trained("supervision.stall_report_s=3")
    run.wait_for("evaluation")
    run.signal("generator-0", signal.SIGSTOP)

    def waits() -> list[str]:
        return [wait for entry in read_log_entries(run.folder, "run.stalled") for wait in entry["waits"]]

    run.wait_until(lambda: any("wait for generator-0: a turn, since" in wait for wait in waits()))
    run.signal("generator-0", signal.SIGCONT)
    assert "no progress for 3 s:" in run.succeed()


@pytest.mark.nightly
def test_a_run_restarts_a_silent_process(start_trained: Start) -> None:
    run = start_trained("supervision.heartbeat_timeout_s=4", "supervision.heartbeat_s=0.5")
    run.wait_for("evaluation")
    for name in ("generator-0", "head"):
        run.signal(name, signal.SIGSTOP)
    output = run.succeed()
    for name in ("generator-0", "head"):
        restart = rf"{name} was killed by signal 9 \({name}: no heartbeat for \d+\.\d s\); it restarts as incarnation 2"
        assert re.search(restart, output)
    assert {"generator-0", "head"} <= {entry["name"] for entry in read_log_entries(run.folder, "process.timed_out")}
    assert read_conserved_summary(run.folder)["restarts"] >= 2
    assert [step["step"] for step in metrics(run.folder, "step")] == [1, 2, 3]


@pytest.mark.parametrize(
    "name",
    ["generator-0", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("learner", "head", "rollout-0"))],
)
def test_without_restarts_a_death_ends_the_run_and_is_named(start_trained: Start, name: str) -> None:
    run = start_trained("supervision.restarts=0")
    run.wait_until(lambda: bool(list_process_ids(run.folder, name)))
    children = family(run.process.pid)[1:]
    run.signal(name)
    assert re.search(f"{name} ended .*with exit code -9", run.end(1))
    assert not [child for child in children if is_running(child)]


@pytest.mark.nightly
def test_a_run_survives_a_killed_executor(start_trained: Start) -> None:
    """The executor is killed twice with the same calls of an evaluation in flight; these calls fail.

    The third incarnation answers the calls that were in flight at only one of the kills.
    """
    settings = "supervision.heartbeat_timeout_s=200"  # longer than the test stops the rollout
    run = start_trained(settings)
    folder = run.folder

    def read_executor_events(event: str, incarnation: int) -> list[dict[str, Any]]:
        return [entry for entry in read_log_entries(folder, event) if entry["executor"] == f"executor-0/{incarnation}"]

    def count_turns() -> int:
        log = folder.events / "rollout-0.sqlite"
        return sum(1 for _ in read_events(log, kinds=["TurnGenerated"])) if log.exists() else 0

    def stop_when_joined(incarnation: int) -> None:
        run.wait_until(lambda: bool(read_executor_events("executor.joined", incarnation)))
        run.signal("executor-0", signal.SIGSTOP)

    # The rollout sends no calls before the executor is stopped, so that the executor answers no call.
    run.wait_until(lambda: bool(list_process_ids(folder, "rollout-0")))
    run.signal("rollout-0", signal.SIGSTOP)
    stop_when_joined(1)
    run.signal("rollout-0", signal.SIGCONT)
    run.wait_until(lambda: count_turns() >= 6)  # all trajectories of the evaluation have generated a turn
    run.signal("rollout-0", signal.SIGSTOP)
    run.signal("executor-0", signal.SIGKILL)
    stop_when_joined(2)
    run.signal("rollout-0", signal.SIGCONT)
    run.wait_until(lambda: any(entry["sent"] for entry in read_executor_events("calls.rescheduled", 2)))
    run.signal("executor-0", signal.SIGKILL)
    output = finish(run.process)
    if run.process.returncode:  # all trajectories of the evaluation had calls and failed
        assert "every trajectory of evaluation start_sampled failed" in output
        start_trained(settings, "--resume").succeed()

    summary = read_conserved_summary(folder)
    lost = [sum(entry["lost"] for entry in read_executor_events("calls.rescheduled", each)) for each in (1, 2)]
    assert lost[0] == 0 < lost[1]
    assert summary["trajectories_failed"] == sum(lost)
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]
    causes = {failure.cause for failure in read_messages(folder, "head", TrajectoryFailed)}
    assert causes == {"executor left: executor-0 was killed by signal 9"}


def test_a_missing_data_file_is_named_and_claims_no_folder(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, "data.train=nowhere.jsonl")
    output = run.end(2)
    assert f"data.train: {ROOT}/nowhere.jsonl: no such file; set data.train to a file of questions" in output
    assert "Traceback" not in output
    assert not run.folder.path.exists()
