"""Strict determinism over real processes: runs with the same seed do the same, whoever is faster."""

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.sameness import differences
from configs.run_folder import RunFolder
from tests.actors.running import ROOT, Start, finish, from_cold_start_of, lives, metrics, until, whole_run
from tests.processes import processes_that_name

pytestmark = pytest.mark.slow

STRICT = ("determinism=strict", "sft.steps=4", "rl.prompts=6", "rl.rollouts=8", "rl.refills=6")


def strict(made: RunFolder) -> tuple[str, ...]:
    """A few steps of the cold start, and of RL with groups that are refilled, from a policy that is right now and then."""
    return (*from_cold_start_of(made), *STRICT)


@pytest.fixture(scope="module")
def strict_run(tmp_path_factory: pytest.TempPathFactory, finished_run: tuple[RunFolder, str]) -> RunFolder:
    return whole_run(tmp_path_factory.mktemp("strict"), *strict(finished_run[0]))[0]


def until_gone(folder: Path) -> None:
    """The processes of a run whose launcher was killed."""
    deadline = time.monotonic() + 10.0
    while left := processes_that_name(str(folder)):
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)  # others move, not this one


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Two processes that compute all the time."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_second_run_is_the_same_byte_for_byte_on_a_busy_machine(
    tmp_path: Path, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    with busy_machine():
        again, _ = whole_run(tmp_path, *strict(finished_run[0]))
    assert differences(strict_run, again) == []
    steps = metrics(again, "step")
    assert sum(step["updates"] for step in steps) > 0
    assert sum(step["groups_rejected"] for step in steps) > 0
    assert len(metrics(again, "evaluation")) == 4


def test_engines_caches_and_executors_change_nothing_of_it(
    tmp_path: Path, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    engines = ("engine.num_engines=2", "engine.kv_tokens=800", "engine.prefill_tokens=9", "arbiter.policy=round_robin")
    other, _ = whole_run(tmp_path, *strict(finished_run[0]), *engines, "sandbox.executors=2", "sandbox.fork_servers=2")
    assert differences(strict_run, other) == []


def test_a_run_that_is_killed_and_resumed_ends_as_one_that_was_not(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    settings = strict(finished_run[0])
    process = start(tmp_path, *settings)
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "step")) >= 1, process)
    process.kill()
    finish(process)
    until_gone(tmp_path)
    resumed = start(tmp_path, *settings, "--resume")
    output = finish(resumed)
    assert resumed.returncode == 0, output
    assert differences(strict_run, folder) == []


def test_a_run_whose_processes_are_killed_one_after_the_other_ends_as_one_without_deaths(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    process = start(tmp_path, *strict(finished_run[0]))
    folder = RunFolder(tmp_path / "demo")
    until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    for name in ("learner", "head", "rollout-0", "generator-0"):
        os.kill(lives(folder, name)[-1], signal.SIGKILL)
        until(lambda name=name: len(lives(folder, name)) == 2, process)
    output = finish(process)
    assert process.returncode == 0, output
    assert json.loads(folder.summary.read_text())["trajectories_failed"] == 0
    assert differences(strict_run, folder) == []


def test_two_learner_ranks_do_the_same_twice(tmp_path: Path, finished_run: tuple[RunFolder, str]) -> None:
    settings = (
        *strict(finished_run[0]),
        "learner.ranks=2",
        "learner.threads=2",
        "rl.steps=2",
        "evaluation.questions=0",
    )
    first, second = (whole_run(tmp_path / name, *settings)[0] for name in ("first", "second"))
    assert differences(first, second) == []
    assert (first.checkpoint(2) / "trainer" / "random_1.pt").exists()


def test_a_strict_run_with_keys_that_race_is_refused(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "determinism=strict", "rl.oversubscribe=1.5")
    output = finish(process)
    assert process.returncode == 2
    assert "rl.oversubscribe = 1.0" in output


# ---------------------------------------------------------------- comparing


def compare(a: RunFolder, b: RunFolder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "analysis.sameness", str(a.path), str(b.path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_run_is_the_same_as_itself_and_every_part_of_it_is_counted(strict_run: RunFolder) -> None:
    found = compare(strict_run, strict_run)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("the same: ")
    assert " 0 of " not in found.stdout


def test_each_part_that_differs_is_named_with_its_first_difference(strict_run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "demo")
    shutil.copytree(strict_run.path, copy.path)
    for process, kind in (("head", "TrajectoryFinished"), ("head", "WeightsPublished"), ("rollout-0", "CodeFinished")):
        with contextlib.closing(sqlite3.connect(copy.events / f"{process}.sqlite")) as log, log:
            log.execute("DELETE FROM events WHERE seq = (SELECT max(seq) FROM events WHERE kind = ?)", (kind,))
    lines = [json.loads(line) for line in copy.metrics.read_text().splitlines()]
    lines[0] |= {"step_s": 7.0}
    lines[-1] |= {"accuracy": 7.0}
    copy.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = copy.checkpoint(3) / "model.safetensors"
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    found = compare(strict_run, copy)
    assert found.returncode == 1
    said = found.stdout.splitlines()
    assert [line.split(": ")[1].split(";")[0] for line in said] == [
        *["only the first run has it"] * 3,
        *["it differs"] * 2,
    ]
    parts = (
        "trajectory ",
        "tool answer (",
        "weights of version 3",
        "line of metrics ('evaluation', 3,",
        "file step_000003/model",
    )
    assert all(line.startswith(part) for line, part in zip(said, parts, strict=True))
    assert all("; 1 of " in line for line in said)


def test_a_folder_without_event_logs_cannot_be_compared(strict_run: RunFolder, tmp_path: Path) -> None:
    found = compare(strict_run, RunFolder(tmp_path))
    assert found.returncode == 2
    assert "there is no event log" in found.stderr
