"""Processes of these runs are stopped, killed, or cannot start: leftovers, restarts and resumption."""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import TrajectoryFailed
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from tests.actors.runs.running import (
    ROOT,
    Start,
    find_last_complete_step,
    finish,
    from_cold_start_of,
    list_process_ids,
    metrics,
    read_conserved_summary,
    read_log_entries,
    succeed,
    wait_until,
)
from tests.processes import family, is_running, processes_that_name

pytestmark = pytest.mark.slow


def wait_until_empty(list_processes: Callable[[], Sequence[object]]) -> None:
    """Wait until the kernel has killed the processes, soon after their parent's death."""
    deadline = time.monotonic() + 60.0
    while left := list_processes():
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)


def test_sigint_ends_a_run_in_order_and_resume_continues_it(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "rl.steps=20")  # does not end before the signal
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "step")) >= 1, process)
    children = family(process.pid)[1:]
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert not [pid for pid in children if is_running(pid)]
    last = find_last_complete_step(folder)
    output = succeed(start(tmp_path, "rl.steps=20", "--resume"))
    assert f"resuming after step {last}" in output
    assert [step["step"] for step in metrics(folder, "step")] == list(range(1, 21))
    assert read_conserved_summary(folder)["pass1_start"] is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_step_that_was_trained_last(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str], number: signal.Signals
) -> None:
    settings = (*from_cold_start_of(finished_run[0]), "rl.steps=40", "learner.checkpoints.every=1000")
    process = start(tmp_path, *settings)
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "step")) >= 2, process)
    process.send_signal(number)
    output = finish(process)
    assert process.returncode == 130, output
    (step,) = [each for each in list_saved_steps(folder.checkpoints) if each]
    assert step >= 2
    assert f"--resume` continues after step {step}, from {folder.get_checkpoint_path(step)}" in output
    again = start(tmp_path, *settings, "--resume")
    wait_until(lambda: len(metrics(folder, "step")) > step, again)
    again.send_signal(number)
    assert f"resuming after step {step}" in finish(again)
    assert [each["step"] for each in metrics(folder, "step")][: step + 1] == list(range(1, step + 2))


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGKILL])
def test_a_second_signal_during_the_save_leaves_a_run_that_resumes(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str], second: signal.Signals
) -> None:
    settings = (*from_cold_start_of(finished_run[0]), "rl.steps=4", "learner.checkpoints.every=1000")
    process = start(tmp_path, *settings)
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "step")) >= 1, process)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: any(folder.checkpoints.glob(".*")) or process.poll() is not None, process)
    process.send_signal(second)
    finish(process)
    wait_until_empty(lambda: processes_that_name(str(tmp_path)))
    succeed(start(tmp_path, *settings, "--resume"))
    assert [each["step"] for each in metrics(folder, "step")] == [1, 2, 3, 4]


def test_kill_9_of_the_launcher_leaves_no_process(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    children = family(process.pid)[1:]
    assert len(children) >= 6
    process.kill()
    finish(process)
    wait_until_empty(lambda: [pid for pid in children if is_running(pid)])
    succeed(start(tmp_path, "--resume"))
    read_conserved_summary(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
def test_a_starting_learner_does_not_outlive_the_launcher(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    process = start(tmp_path, "learner.ranks=2")  # torchrun starts the ranks
    wait_until(
        lambda: any(
            "asterism.engine.learner" in line and "torch.distributed" not in line
            for line in processes_that_name(str(tmp_path))
        ),
        process,
    )
    process.send_signal(number)
    finish(process)
    wait_until_empty(lambda: processes_that_name(str(tmp_path)))


@pytest.mark.nightly
def test_a_run_survives_the_kill_of_one_of_two_learner_ranks_and_of_torchrun(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), "learner.ranks=2", "rl.steps=4")
    folder = RunFolder(tmp_path / "demo")
    for step, choose in ((1, lambda torchrun: family(torchrun)[-1]), (2, lambda torchrun: torchrun)):
        wait_until(lambda step=step: len(metrics(folder, "step")) >= step, process)
        os.kill(choose(list_process_ids(folder, "learner")[-1]), signal.SIGKILL)
    succeed(process)
    assert len(list_process_ids(folder, "learner")) == 3
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3, 4]
    assert not processes_that_name(str(tmp_path))


@pytest.mark.nightly
def test_a_run_that_is_interrupted_during_task_preparation_can_be_resumed(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    wait_until(lambda: (tmp_path / "demo" / "data" / "train.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    finish(process)
    succeed(start(tmp_path, "--resume"))


def test_a_run_survives_a_kill_of_any_process(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    """Each process is killed, one after the other, in the middle of the run: no work is lost or done twice."""
    settings = ("rl.steps=12", "rl.prompts=4", "rl.rollouts=8", "learner.checkpoints.every=3")
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), *settings)
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "step")) >= 1, process)
    for name in ("learner", "head", "rollout-0", "generator-0"):
        os.kill(list_process_ids(folder, name)[-1], signal.SIGKILL)
        wait_until(lambda name=name: len(list_process_ids(folder, name)) == 2, process)
    succeed(process)
    assert read_conserved_summary(folder)["trajectories_abandoned"] == 0
    assert [step["step"] for step in metrics(folder, "step")] == list(range(1, 13))
    assert [line["label"] for line in metrics(folder, "evaluation")] == [
        *("start_sampled", "start_greedy"),
        *("end_sampled", "end_greedy"),
    ]


@pytest.mark.nightly
def test_a_stalled_run_reports_its_waits(tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]) -> None:
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), "supervision.stall_report_s=3")
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    os.kill(list_process_ids(folder, "generator-0")[0], signal.SIGSTOP)

    def waits() -> list[str]:
        return [wait for entry in read_log_entries(folder, "run.stalled") for wait in entry["waits"]]

    wait_until(lambda: any("wait for generator-0: a turn, since" in wait for wait in waits()), process)
    os.kill(list_process_ids(folder, "generator-0")[0], signal.SIGCONT)
    output = succeed(process)
    assert "no progress for 3 s:" in output


@pytest.mark.nightly
def test_a_run_restarts_a_silent_process(tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]) -> None:
    settings = ("supervision.heartbeat_timeout_s=4", "supervision.heartbeat_s=0.5")
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), *settings)
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    for name in ("generator-0", "head"):
        os.kill(list_process_ids(folder, name)[-1], signal.SIGSTOP)
    output = succeed(process)
    for name in ("generator-0", "head"):
        restart = rf"{name} was killed by signal 9 \({name}: no heartbeat for \d+\.\d s\); it restarts as incarnation 2"
        assert re.search(restart, output)
    assert {"generator-0", "head"} <= {entry["name"] for entry in read_log_entries(folder, "process.timed_out")}
    assert read_conserved_summary(folder)["restarts"] >= 2
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]


@pytest.mark.parametrize(
    "name",
    ["generator-0", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("learner", "head", "rollout-0"))],
)
def test_without_restarts_a_death_ends_the_run_and_is_named(tmp_path: Path, start: Start, name: str) -> None:
    process = start(tmp_path, "supervision.restarts=0")
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: bool(list_process_ids(folder, name)), process)
    children = family(process.pid)[1:]
    os.kill(list_process_ids(folder, name)[0], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert re.search(f"{name} ended .*with exit code -9", output)
    assert not [child for child in children if is_running(child)]


@pytest.mark.nightly
def test_a_run_survives_a_killed_executor(tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]) -> None:
    """The executor is killed with all calls of an evaluation in flight, and again with the same calls, which fail.

    The next incarnation answers calls that were in flight at only one kill.
    """
    # The timeout is longer than the rollout is stopped, also on a busy machine.
    settings = (*from_cold_start_of(finished_run[0]), "supervision.heartbeat_timeout_s=200")
    process = start(tmp_path, *settings)
    folder = RunFolder(tmp_path / "demo")

    def read_executor_events(event: str, incarnation: int) -> list[dict[str, Any]]:
        return [entry for entry in read_log_entries(folder, event) if entry["executor"] == f"executor-0/{incarnation}"]

    def count_turns() -> int:
        log = folder.events / "rollout-0.sqlite"
        return sum(1 for _ in read_events(log, kinds=["TurnGenerated"])) if log.exists() else 0

    def signal_process(name: str, number: signal.Signals) -> None:
        os.kill(list_process_ids(folder, name)[-1], number)

    def stop_when_joined(incarnation: int) -> None:
        wait_until(lambda: bool(read_executor_events("executor.joined", incarnation)), process)
        signal_process("executor-0", signal.SIGSTOP)

    # The rollout, which sends the calls, is stopped until an executor is stopped, so that the executor answers no call.
    wait_until(lambda: bool(list_process_ids(folder, "rollout-0")), process)
    signal_process("rollout-0", signal.SIGSTOP)
    stop_when_joined(1)
    signal_process("rollout-0", signal.SIGCONT)
    wait_until(lambda: count_turns() >= 6, process)  # all trajectories of the evaluation have generated a turn
    signal_process("rollout-0", signal.SIGSTOP)
    signal_process("executor-0", signal.SIGKILL)
    stop_when_joined(2)
    signal_process("rollout-0", signal.SIGCONT)
    wait_until(lambda: any(entry["sent"] for entry in read_executor_events("calls.rescheduled", 2)), process)
    signal_process("executor-0", signal.SIGKILL)
    output = finish(process)
    if process.returncode:  # no trajectory of the evaluation answered without a call
        assert "every trajectory of evaluation start_sampled failed" in output
        succeed(start(tmp_path, *settings, "--resume"))

    summary = read_conserved_summary(folder)
    lost = [sum(entry["lost"] for entry in read_executor_events("calls.rescheduled", each)) for each in (1, 2)]
    assert lost[0] == 0 < lost[1]
    assert summary["trajectories_failed"] == sum(lost)
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]
    events = read_events(folder.events / "head.sqlite", kinds=["TrajectoryFailed"])
    failures = [decode(event.frame).message for event, _ in events]
    causes = {message.cause for message in failures if isinstance(message, TrajectoryFailed)}
    assert causes == {"executor left: executor-0 was killed by signal 9"}


def test_an_executor_that_cannot_start_ends_the_run(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "sandbox.backend=docker", "sandbox.image=no-such-image:missing")
    output = finish(process)
    assert process.returncode == 1, output
    assert "executor-0 ended with exit code 2" in output
    assert len(list_process_ids(RunFolder(tmp_path / "demo"), "executor-0")) == 1


def test_a_missing_data_file_is_named_and_claims_no_folder(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "data.train=nowhere.jsonl")
    output = finish(process)
    assert process.returncode == 2
    assert f"data.train: {ROOT}/nowhere.jsonl: no such file; set data.train to a file of questions" in output
    assert "Traceback" not in output
    assert not (tmp_path / "demo").exists()


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_runs(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path, "rl.steps=100000")  # does not finish before the second run has started
    wait_until(lambda: (tmp_path / "demo" / "data").exists(), first)
    second = start(tmp_path, "--overwrite")
    output = finish(second)
    assert second.returncode == 2
    assert f"using this folder (process {first.pid})" in output
    first.send_signal(signal.SIGINT)
    finish(first)
    assert first.returncode == 130
