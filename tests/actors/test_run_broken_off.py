"""Runs whose processes are stopped, die, or cannot stand: what is left of them, and how they go on."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import TrajectoryFailed
from configs.run_folder import RunFolder
from tests.actors.running import (
    Start,
    adds_up,
    finish,
    from_cold_start_of,
    lives,
    metrics,
    said,
    until,
)
from tests.processes import family, is_running, processes_that_name

pytestmark = pytest.mark.slow


def test_sigint_ends_a_run_in_order_and_resume_goes_on(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "step")) >= 1, process)
    children = family(process.pid)[1:]
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert time.monotonic() - began < 5.0
    assert not [pid for pid in children if is_running(pid)]
    done = folder.checkpoints.glob("step_*")
    last = max(int(path.name.removeprefix("step_")) for path in done)
    resumed = start(tmp_path, "--resume")
    output = finish(resumed)
    assert resumed.returncode == 0, output
    assert f"going on after step {last}" in output
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]
    summary = json.loads(folder.summary.read_text())
    assert summary["replay_identical"] is True
    assert summary["pass1_start"] is not None
    assert adds_up(summary)


def test_kill_9_of_the_launcher_leaves_no_process_behind(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    children = family(process.pid)[1:]
    assert len(children) >= 6
    process.kill()
    finish(process)
    deadline = time.monotonic() + 10.0
    while left := [pid for pid in children if is_running(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)
    resumed = start(tmp_path, "--resume")
    output = finish(resumed)
    assert resumed.returncode == 0, output
    summary = json.loads(folder.summary.read_text())
    assert adds_up(summary)
    assert summary["replay_identical"] is True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_learner_that_is_only_starting_does_not_outlive_the_launcher(
    tmp_path: Path, start: Start, number: signal.Signals
) -> None:
    process = start(tmp_path)
    until(
        lambda: any(
            "engine.learner" in line and "torch.distributed" not in line for line in processes_that_name(str(tmp_path))
        ),
        process,
    )
    process.send_signal(number)
    finish(process)
    deadline = time.monotonic() + 10.0
    while left := processes_that_name(str(tmp_path)):
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)


def test_a_run_that_was_interrupted_while_it_made_its_data_can_be_resumed(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    until(lambda: (tmp_path / "demo" / "data" / "train.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    finish(process)
    resumed = start(tmp_path, "--resume", "rl.steps=3")
    output = finish(resumed)
    assert resumed.returncode == 0, output


def test_each_process_may_be_killed_and_the_run_goes_on(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    """One after the other, each in the middle of the run: nothing is lost, and nothing is done twice."""
    settings = ("rl.steps=4", "rl.prompts=4", "rl.rollouts=8", "learner.checkpoint_every=3")
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), *settings)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "step")) >= 1, process)
    for name in ("learner", "head", "rollout-0", "generator-0"):
        os.kill(lives(folder, name)[-1], signal.SIGKILL)
        until(lambda name=name: len(lives(folder, name)) == 2, process)
    output = finish(process)
    assert process.returncode == 0, output
    summary = json.loads(folder.summary.read_text())
    assert adds_up(summary)
    assert summary["trajectories_abandoned"] == 0
    assert summary["replay_identical"] is True
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3, 4]
    assert [line["label"] for line in metrics(folder, "evaluation")] == [
        *("start_sampled", "start_greedy"),
        *("end_sampled", "end_greedy"),
    ]


def test_a_run_that_stalls_says_who_waits_for_whom(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), "supervision.stall_s=3")
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    os.kill(lives(folder, "generator-0")[0], signal.SIGSTOP)

    def waits() -> list[str]:
        return [wait for entry in said(folder, "run.stalled") for wait in entry["waits"]]

    until(lambda: any("wait for generator-0: a turn, since" in wait for wait in waits()), process)
    os.kill(lives(folder, "generator-0")[0], signal.SIGCONT)
    output = finish(process)
    assert process.returncode == 0, output
    assert "no progress for 3 s:" in output


def test_a_process_that_falls_silent_is_started_again(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    settings = ("supervision.silent_s=4", "supervision.heartbeat_s=0.5")
    process = start(tmp_path, *from_cold_start_of(finished_run[0]), *settings)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    for name in ("generator-0", "head"):
        os.kill(lives(folder, name)[-1], signal.SIGSTOP)
    output = finish(process)
    assert process.returncode == 0, output
    assert {"generator-0", "head"} <= {entry["name"] for entry in said(folder, "process.silent")}
    summary = json.loads(folder.summary.read_text())
    assert adds_up(summary)
    assert summary["replay_identical"] is True
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]


@pytest.mark.parametrize("name", ["generator-0", "learner", "head", "rollout-0"])
def test_where_none_is_started_again_a_death_ends_the_run_and_is_named(tmp_path: Path, start: Start, name: str) -> None:
    process = start(tmp_path, "supervision.restarts=0")
    folder = RunFolder(tmp_path / "demo")
    until(lambda: bool(lives(folder, name)), process)
    children = family(process.pid)[1:]
    os.kill(lives(folder, name)[0], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert re.search(f"{name} ended .*with exit code -9", output)
    assert not [child for child in children if is_running(child)]


def test_an_executor_that_is_killed_comes_back_and_the_run_goes_on(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    """Killed with all calls of an evaluation under way, and its next life with the same calls: those are lost, and named.
    What was under way at one death alone has its answer from the next life."""
    process = start(tmp_path, *from_cold_start_of(finished_run[0]))
    folder = RunFolder(tmp_path / "demo")

    def moved(executor: str, key: str) -> int:
        return sum(entry[key] for entry in said(folder, "calls.moved") if entry["executor"] == executor)

    def joined(life: int) -> bool:
        return any(entry["executor"] == f"executor-0/{life}" for entry in said(folder, "executor.joined"))

    def turns() -> int:
        log = folder.events / "rollout-0.sqlite"
        return sum(1 for _ in read_events(log, kinds=["TurnGenerated"])) if log.exists() else 0

    def stop_at_once(life: int) -> None:
        until(lambda: joined(life), process)
        os.kill(lives(folder, "executor-0")[life - 1], signal.SIGSTOP)

    stop_at_once(1)
    until(lambda: turns() >= 6, process)  # all of the evaluation have said something
    (rollout,) = lives(folder, "rollout-0")
    os.kill(rollout, signal.SIGSTOP)  # so that the second life cannot answer before it is stopped
    os.kill(lives(folder, "executor-0")[0], signal.SIGKILL)
    stop_at_once(2)
    os.kill(rollout, signal.SIGCONT)
    until(lambda: moved("executor-0/2", "sent") > 0, process)
    os.kill(lives(folder, "executor-0")[1], signal.SIGKILL)
    until(lambda: joined(3), process)
    stop_at_once(3)
    os.kill(lives(folder, "executor-0")[2], signal.SIGKILL)  # between calls, or with some that are asked for again
    output = finish(process)
    assert process.returncode == 0, output

    summary = json.loads(folder.summary.read_text())
    assert adds_up(summary)
    assert summary["replay_identical"] is True
    assert summary["trajectories_failed"] == moved("executor-0/2", "lost") > 0
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]
    assert sum(evaluation["failed"] for evaluation in metrics(folder, "evaluation")) == summary["trajectories_failed"]
    heard = [
        decode(event.frame).message
        for event, _ in read_events(folder.events / "head.sqlite", kinds=["TrajectoryFailed"])
    ]
    causes = {message.cause for message in heard if isinstance(message, TrajectoryFailed)}
    assert causes == {"executor left: executor-0 ended with exit code -9"}


def test_an_executor_that_cannot_stand_ends_the_run_with_what_it_lacks(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "sandbox.backend=docker", "sandbox.image=no-such-image:nowhere")
    output = finish(process)
    assert process.returncode == 1, output
    assert "executor-0 ended with exit code 2" in output
    assert len(lives(RunFolder(tmp_path / "demo"), "executor-0")) == 1


def test_a_data_file_that_is_missing_ends_the_run_with_its_name(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "data.train=nowhere.jsonl")
    output = finish(process)
    assert process.returncode == 1
    assert "head ended with exit code 2" in output
    assert "nowhere.jsonl: no such file" in output
    assert "Traceback" not in output


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_goes_on(tmp_path: Path, start: Start) -> None:
    first = start(tmp_path)
    until(lambda: (tmp_path / "demo" / "data").exists(), first)
    second = start(tmp_path, "--overwrite")
    output = finish(second)
    assert second.returncode == 2
    assert f"using this folder (process {first.pid})" in output
    first.send_signal(signal.SIGINT)
    finish(first)
    assert first.returncode == 130
