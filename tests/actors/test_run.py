"""Whole runs over real processes: launcher, head, rollout, generator, executor and learner, on the tiny task."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.codec import decode
from bus.event_log import read_events
from bus.messages import AnswerGraded, CodeFinished, StepRequested, TrajectoryFailed, TrajectoryFinished
from configs.run_folder import RunFolder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS = (
    *("tiny.num_train_questions=64", "tiny.num_test_questions=16", "tiny.num_sft_dialogues=200"),
    *("sft.steps=4", "sft.batch_size=16", "rl.steps=3", "rl.prompts=2", "rl.rollouts=4"),
    *("learner.checkpoint_every=1", "learner.threads=1", "evaluation.questions=6"),
    "sandbox.backend=process",
)
PATIENCE_S = 120.0


def command(runs: Path, *arguments: str) -> list[str]:
    settings = [argument for setting in (*SETTINGS, f'runs_folder="{runs}"') for argument in ("--set", setting)]
    return [sys.executable, "-m", "actors.cli", "run", "configs/tiny.toml", *settings, *arguments]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a run; whatever a test leaves running is ended after the last one."""
    started: list[subprocess.Popen[str]] = []

    def launch(runs: Path, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(runs, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return output


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)  # another process moves, not this one


def processes_of(runs: Path) -> list[str]:
    """Command lines of all living processes that name the folder."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(runs) in line and int(entry.parent.name) != os.getpid():
                found.append(line)
    return found


def descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found, frontier = set[int](), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def adds_up(summary: dict[str, int]) -> bool:
    ends = sum(summary[f"trajectories_{end}"] for end in ("finished", "failed", "abandoned"))
    return summary["trajectories_started"] == ends


def metrics(folder: RunFolder, kind: str) -> list[dict[str, float]]:
    if not folder.metrics.exists():
        return []
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Iterator[tuple[RunFolder, str]]:
    """With a cold start that is just long enough for a policy that is right now and then: its steps are real updates."""
    runs = tmp_path_factory.mktemp("runs")
    cold_start = ("sft.steps=150", "sft.batch_size=32", "tiny.num_sft_dialogues=4800", "rl.prompts=8", "rl.rollouts=16")
    process = start(runs, *(argument for setting in cold_start for argument in ("--set", setting)))
    output = finish(process)
    assert process.returncode == 0, output
    yield RunFolder(runs / "demo"), output


def test_a_run_writes_what_it_promises(finished_run: tuple[RunFolder, str]) -> None:
    folder, output = finished_run
    summary = json.loads(folder.summary.read_text())
    promised = (
        "seed params sft_s rl_s steps pass1_start pass1_end greedy_start greedy_end err_positive_start err_positive_end "
        "tokens_per_s trajectories_started trajectories_finished trajectories_failed replay_identical"
    )
    assert set(promised.split()) <= set(summary)
    assert summary["steps"] == 3
    assert summary["sft_s"] > 0
    assert summary["replay_identical"] is True
    assert summary["isolation"]["backend"] == "process"
    assert folder.curves.read_bytes().startswith(b"\x89PNG")
    assert "right answers" in output


def test_each_started_trajectory_is_finished_or_failed(finished_run: tuple[RunFolder, str]) -> None:
    summary = json.loads(finished_run[0].summary.read_text())
    assert adds_up(summary)
    assert summary["trajectories_failed"] == 0
    assert summary["trajectories_abandoned"] == 0
    assert summary["trajectories_started"] >= 3 * 8 * 16 + 4 * 6


def test_a_steps_phases_add_up(finished_run: tuple[RunFolder, str]) -> None:
    for step in metrics(finished_run[0], "step"):
        assert step["rollout_s"] + step["train_s"] + step["weights_s"] == pytest.approx(step["step_s"])


def test_the_steps_are_updates_on_what_the_generator_produced(finished_run: tuple[RunFolder, str]) -> None:
    steps = metrics(finished_run[0], "step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert sum(step["rows"] for step in steps) > 0
    assert sum(step["updates"] for step in steps) > 0
    assert all(step["mismatch_max"] < 1e-4 for step in steps if step["rows"])


def test_every_generated_token_bears_the_version_of_the_step_before(finished_run: tuple[RunFolder, str]) -> None:
    version, seen = -1, set[int]()
    for event, _ in read_events(finished_run[0].events / "head.sqlite", kinds=["StepRequested", "TrajectoryFinished"]):
        message = decode(event.frame).message
        if isinstance(message, StepRequested):
            version = message.version
        if isinstance(message, TrajectoryFinished) and version >= 0:
            generated = np.frombuffer(message.loss_mask, np.uint8).astype(bool)
            versions = np.frombuffer(message.versions, np.int32)
            last = {3} if version == 2 else set[int]()  # the last evaluation comes after the last step
            assert set(versions[generated].tolist()) <= {version} | last
            assert set(versions[~generated].tolist()) <= {-1}
            seen |= set(versions[generated].tolist())
    assert seen == {0, 1, 2, 3}


def test_the_checkpoints_are_ordinary_transformers_folders(finished_run: tuple[RunFolder, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds: not for those who only collect

    checkpoint = finished_run[0].checkpoint(3)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("1", return_tensors="pt").input_ids
    assert model(ids).logits.shape[-1] == model.config.vocab_size


def test_no_process_socket_or_shared_memory_is_left(finished_run: tuple[RunFolder, str]) -> None:
    folder = finished_run[0]
    assert processes_of(folder.path.parent) == []
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()


def test_a_finished_runs_log_can_be_replayed_and_told(finished_run: tuple[RunFolder, str]) -> None:
    folder = str(finished_run[0].path)
    asterism = [sys.executable, "-m", "actors.cli"]
    replay = subprocess.run([*asterism, "log", "replay", folder, "--verify"], cwd=ROOT, capture_output=True, text=True)
    assert replay.returncode == 0
    assert "identical" in replay.stdout
    story = subprocess.run([*asterism, "log", "story", folder, "3"], cwd=ROOT, capture_output=True, text=True)
    kinds = ["StartGroup", "LeaseRequested", "LeaseGranted", "TurnGenerated", "TrajectoryFinished"]
    positions = [story.stdout.index(kind) for kind in kinds]
    assert positions == sorted(positions)
    unknown = subprocess.run([*asterism, "log", "story", folder, "99999"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "no log knows trajectory 99999" in unknown.stderr


def test_the_report_agrees_with_the_event_log_within_one_percent(finished_run: tuple[RunFolder, str]) -> None:
    folder = finished_run[0]
    argv = [sys.executable, "-m", "actors.cli", "report", str(folder.path), "--json"]
    report = json.loads(subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    told = report["trajectories"]
    events = read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"])
    ended = [message for event, _ in events if isinstance(message := decode(event.frame).message, TrajectoryFinished)]
    assert told["started"] == told["ended"] == len(ended)
    assert told["generated_tokens"] == pytest.approx(sum(sum(each.loss_mask) for each in ended), rel=0.01)
    for wait, times in told["waits"].items():
        assert times["total_s"] == pytest.approx(sum(getattr(each, wait) for each in ended), rel=0.01)
    assert [step["trajectories"] for step in report["steps"] if step["rollout_s"] is not None] == [
        step["trajectories"] for step in metrics(folder, "step")
    ]
    answered = list(read_events(folder.events / "rollout-0.sqlite", kinds=["CodeFinished"]))
    assert report["executors"][0]["calls"] == pytest.approx(len(answered), rel=0.01)
    assert report["unusable_lines"] == 0


def test_a_changed_log_is_found_out_at_the_event(finished_run: tuple[RunFolder, str], tmp_path: Path) -> None:
    copy = tmp_path / "demo"
    shutil.copytree(finished_run[0].path, copy)
    resolved = (copy / "config.toml").read_text().replace("$RUN", str(finished_run[0].path))
    (copy / "config.toml").write_text(resolved)
    with contextlib.closing(sqlite3.connect(copy / "events" / "head.sqlite")) as log, log:
        (seq,) = log.execute("SELECT seq FROM events WHERE kind = 'LeaseReleased' ORDER BY seq LIMIT 1").fetchone()
        log.execute("UPDATE decisions SET effects = x'00' WHERE seq = ?", (seq,))
    replay = subprocess.run(
        [sys.executable, "-m", "actors.cli", "log", "replay", str(copy), "--verify"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert replay.returncode == 1
    assert f"event {seq} of head" in replay.stdout


def test_sigint_ends_a_run_in_order_and_resume_goes_on(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "step")) >= 1, process)
    children = descendants(process.pid)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "--resume" in output
    assert time.monotonic() - began < 5.0
    assert not [pid for pid in children if alive(pid)]
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
    children = descendants(process.pid)
    assert len(children) >= 6
    process.kill()
    finish(process)
    deadline = time.monotonic() + 10.0
    while left := [pid for pid in children if alive(pid)]:
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
        lambda: any("engine.learner" in line and "torch.distributed" not in line for line in processes_of(tmp_path)),
        process,
    )
    process.send_signal(number)
    finish(process)
    deadline = time.monotonic() + 10.0
    while left := processes_of(tmp_path):
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)


def test_a_run_that_was_interrupted_while_it_made_its_data_can_be_resumed(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path)
    until(lambda: (tmp_path / "demo" / "data" / "train.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    finish(process)
    resumed = start(tmp_path, "--resume", "--set", "rl.steps=3")
    output = finish(resumed)
    assert resumed.returncode == 0, output


def said(folder: RunFolder, event: str) -> list[dict[str, Any]]:
    """What the launcher's log has of one kind."""
    log = folder.logs / "launcher.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["event"] == event]


def lives(folder: RunFolder, name: str) -> list[int]:
    """Process ids of all that were started under the name."""
    return [entry["pid"] for entry in said(folder, "process.started") if entry["name"] == name]


@pytest.mark.parametrize("name", ["generator-0", "learner", "head", "rollout-0"])
def test_the_death_of_a_process_ends_the_run_and_is_named(tmp_path: Path, start: Start, name: str) -> None:
    process = start(tmp_path)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: bool(lives(folder, name)), process)
    children = descendants(process.pid)
    os.kill(lives(folder, name)[0], signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert f"{name} ended with exit code -9" in output
    assert not [child for child in children if alive(child)]


def test_an_executor_that_is_killed_comes_back_and_the_run_goes_on(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]
) -> None:
    """Killed with all calls of an evaluation under way, and its next life with the same calls: those are lost, and named.
    What was under way at one death alone has its answer from the next life."""
    made = finished_run[0]
    settings = (
        *("sft.steps=0", f"model.checkpoint={made.checkpoint(0)}"),
        *(f"data.train={made.data / 'train.jsonl'}", f"data.test={made.data / 'test.jsonl'}"),
    )
    process = start(tmp_path, *(argument for setting in settings for argument in ("--set", setting)))
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
    process = start(tmp_path, "--set", "sandbox.backend=docker", "--set", "sandbox.image=no-such-image:nowhere")
    output = finish(process)
    assert process.returncode == 1, output
    assert "executor-0 ended with exit code 2" in output
    assert len(lives(RunFolder(tmp_path / "demo"), "executor-0")) == 1


def test_two_executors_share_a_run(tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str]) -> None:
    made = finished_run[0]
    settings = (
        *("sft.steps=0", f"model.checkpoint={made.checkpoint(0)}", "sandbox.executors=2"),
        *(f"data.train={made.data / 'train.jsonl'}", f"data.test={made.data / 'test.jsonl'}"),
    )
    process = start(tmp_path, *(argument for setting in settings for argument in ("--set", setting)))
    output = finish(process)
    assert process.returncode == 0, output
    folder = RunFolder(tmp_path / "demo")
    kinds = ["CodeFinished", "AnswerGraded"]
    answers = [decode(event.frame).message for event, _ in read_events(folder.events / "rollout-0.sqlite", kinds=kinds)]
    by = {answer.executor for answer in answers if isinstance(answer, CodeFinished | AnswerGraded)}
    assert by == {"executor-0/1", "executor-1/1"}
    assert json.loads(folder.summary.read_text())["replay_identical"] is True


def test_a_data_file_that_is_missing_ends_the_run_with_its_name(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "--set", "data.train=nowhere.jsonl")
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


def test_a_run_can_be_a_cold_start_alone(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "--set", "rl.steps=0", "--set", "evaluation.questions=0")
    output = finish(process)
    assert process.returncode == 0, output
    folder = RunFolder(tmp_path / "demo")
    assert json.loads(folder.summary.read_text())["steps"] == 0
    assert (folder.checkpoint(0) / "model.safetensors").exists()


def test_two_learner_ranks_train_as_one_process_does(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "--set", "learner.ranks=2")
    output = finish(process)
    assert process.returncode == 0, output
    folder = RunFolder(tmp_path / "demo")
    assert [step["step"] for step in metrics(folder, "step")] == [1, 2, 3]
    assert not processes_of(tmp_path)
