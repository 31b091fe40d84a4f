"""Strict determinism over real processes: runs with the same seed have the same results, whatever the timing."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.analysis.event_logs.comparable_events import read_event_streams
from asterism.analysis.event_logs.diff import list_divergences
from asterism.configs.file_manifest import MANIFEST_NAME
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    Start,
    asterism,
    finish,
    from_cold_start_of,
    list_process_ids,
    metrics,
    wait_until,
    whole_run,
)
from tests.edited_logs import editing_log
from tests.processes import processes_that_name

pytestmark = pytest.mark.slow

STRICT = ("determinism=strict", "sft.steps=4", "rl.prompts=6", "rl.rollouts=8", "rl.max_refill_groups=6")


def build_strict_settings(made: RunFolder) -> tuple[str, ...]:
    """Return settings of a few cold start and RL steps with refilled groups, from a policy that is sometimes right."""
    return (*from_cold_start_of(made), *STRICT)


@pytest.fixture(scope="module")
def strict_run(tmp_path_factory: pytest.TempPathFactory, finished_run: tuple[RunFolder, str]) -> RunFolder:
    return whole_run(tmp_path_factory.mktemp("strict"), *build_strict_settings(finished_run[0]))[0]


def wait_until_exited(folder: Path) -> None:
    """Wait for the processes of a run with a killed launcher."""
    deadline = time.monotonic() + 60.0
    while left := processes_that_name(str(folder)):
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)  # waits for other processes


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Keep two cores busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_second_run_on_a_busy_machine_is_identical_byte_for_byte(
    tmp_path: Path, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    with busy_machine():
        again, _ = whole_run(tmp_path, *build_strict_settings(finished_run[0]))
    assert list_divergences(strict_run, again) == []
    steps = metrics(again, "step")
    assert sum(step["updates"] for step in steps) > 0
    assert sum(step["groups_rejected"] for step in steps) > 0
    assert len(metrics(again, "evaluation")) == 4


@pytest.mark.nightly
def test_numbers_of_engines_cache_sizes_and_executors_do_not_change_the_results(
    tmp_path: Path, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    engines = ("engine.num_engines=2", "engine.kv_tokens=800", "engine.prefill_tokens=9", "arbiter.policy=round_robin")
    other, _ = whole_run(
        tmp_path, *build_strict_settings(finished_run[0]), *engines, "sandbox.executors=2", "sandbox.fork_servers=2"
    )
    assert list_divergences(strict_run, other) == []


def test_a_killed_and_resumed_run_has_the_same_results(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    settings = build_strict_settings(finished_run[0])
    process = start(tmp_path, *settings)
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "step")) >= 1, process)
    process.kill()
    finish(process)
    wait_until_exited(tmp_path)
    resumed = start(tmp_path, *settings, "--resume")
    output = finish(resumed)
    assert resumed.returncode == 0, output
    assert list_divergences(strict_run, folder) == []


@pytest.mark.nightly
def test_a_run_with_killed_processes_has_the_same_results(
    tmp_path: Path, start: Start, finished_run: tuple[RunFolder, str], strict_run: RunFolder
) -> None:
    process = start(tmp_path, *build_strict_settings(finished_run[0]))
    folder = RunFolder(tmp_path / "demo")
    wait_until(lambda: len(metrics(folder, "evaluation")) >= 1, process)
    for name in ("learner", "head", "rollout-0", "generator-0"):
        os.kill(list_process_ids(folder, name)[-1], signal.SIGKILL)
        wait_until(lambda name=name: len(list_process_ids(folder, name)) == 2, process)
    output = finish(process)
    assert process.returncode == 0, output
    assert json.loads(folder.summary.read_text())["trajectories_failed"] == 0
    assert list_divergences(strict_run, folder) == []


@pytest.mark.nightly
def test_two_runs_with_two_learner_ranks_are_identical(tmp_path: Path, finished_run: tuple[RunFolder, str]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader  # slow imports, not needed for collection

    from asterism.engine.learner.checkpoints.checkpoint_folders import get_tensors_folder

    settings = (
        *build_strict_settings(finished_run[0]),
        "learner.ranks=2",
        "learner.threads=2",
        "rl.steps=2",
        "evaluation.questions=0",
    )
    first, second = (whole_run(tmp_path / name, *settings)[0] for name in ("first", "second"))
    assert list_divergences(first, second) == []
    saved = FileSystemReader(get_tensors_folder(first.get_checkpoint_path(2))).read_metadata().state_dict_metadata
    assert {"random.cpu_0", "random.cpu_1"} <= set(saved)


def test_a_strict_run_with_racing_settings_is_refused(tmp_path: Path, start: Start) -> None:
    process = start(tmp_path, "determinism=strict", "rl.group_oversampling=1.5")
    output = finish(process)
    assert process.returncode == 2
    assert "rl.group_oversampling = 1.0" in output


def test_a_run_equals_itself_and_every_part_is_compared(strict_run: RunFolder) -> None:
    assert list_divergences(strict_run, strict_run) == []
    assert {name.split()[0] for name in read_event_streams(strict_run)} == {
        *("trajectory", "step", "evaluation", "weights", "metrics,", "checkpoint")
    }


def test_each_differing_part_is_named(strict_run: RunFolder, tmp_path: Path) -> None:
    copy = RunFolder(tmp_path / "demo")
    shutil.copytree(strict_run.path, copy.path)
    for process, which in (
        ("head", "max(seq) FROM events WHERE kind = 'TrajectoryFinished'"),
        ("head", "max(seq) FROM events WHERE kind = 'WeightsPublished'"),
        ("rollout-0", "min(seq) FROM events WHERE kind = 'CodeFinished'"),
    ):
        with editing_log(copy.events / f"{process}.sqlite") as log:
            log.execute(f"DELETE FROM events WHERE seq = (SELECT {which})")
    lines = [json.loads(line) for line in copy.metrics.read_text().splitlines()]
    lines[0] |= {"step_s": 7.0}
    lines[-1] |= {"accuracy": 7.0}
    copy.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = copy.get_checkpoint_path(3) / "model.safetensors"
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    (changed.parent / MANIFEST_NAME).unlink()
    streams = sorted(each.stream for each in list_divergences(strict_run, copy))
    patterns = (
        r"checkpoint step_000003",
        r"metrics, evaluation \S+ 3",
        *[r"trajectory \d+"] * 2,
        r"weights of version 3",
    )
    assert all(re.fullmatch(pattern, name) for pattern, name in zip(patterns, streams, strict=True)), streams


def test_the_command_exits_with_1_if_runs_differ(strict_run: RunFolder, finished_run: tuple[RunFolder, str]) -> None:
    for other, code in ((strict_run, 0), (finished_run[0], 1)):
        assert asterism("log", "diff", str(strict_run.path), str(other.path)).returncode == code
