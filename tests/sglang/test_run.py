"""Whole runs on a real SGLang server: weights reach it each way, numbers add up, nothing is left; also where it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.run_folder import RunFolder
from tests.actors.running import (
    COLD_START,
    adds_up,
    finish,
    from_cold_start_of,
    launch,
    lives,
    metrics,
    said,
    until,
    versions,
    whole_run,
)
from tests.processes import family, is_running, processes_that_name
from tests.sglang.environment import PYTHON
from tests.sglang.serving import SHIMS

PATIENCE_S = 1500.0  # a server takes a minute to start on two idle cores
pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

SCHEDULER = "sglang::scheduler"
SERVED = (
    *("engine.kind=sglang", "engine.kv_tokens=8192", "engine.max_running=16", f'sglang.python="{PYTHON}"'),
    *('sglang.arguments=["--enable-deterministic-inference"]', f'sglang.environment={{PYTHONPATH="{SHIMS}"}}'),
    *("rl.prompts=4", "rl.rollouts=8", "evaluation.questions=4", f"sglang.start_s={PATIENCE_S}"),
)


@pytest.fixture(scope="module")
def cold_start(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return whole_run(tmp_path_factory.mktemp("cold"), *COLD_START, "rl.steps=0", "evaluation.questions=0")[0]


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    return ""


def schedulers(launcher: int) -> list[int]:
    return [pid for pid in family(launcher) if name_of(pid) == SCHEDULER]


def inodes() -> set[int]:
    """Of shared memory that has a name."""
    return {path.stat().st_ino for path in Path("/dev/shm").iterdir()}


def shared_by(pids: list[int]) -> Iterator[int]:
    """The inodes of shared memory that the processes have mapped."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended in between
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            yield from (int(line.split()[4]) for line in lines if "/dev/shm/" in line)


def is_generating(folder: RunFolder, version: int) -> bool:
    loads = said(folder, "engine.load", "generator-0")
    return bool(loads) and loads[-1]["version"] == version and loads[-1]["running"] > 0


def check(folder: RunFolder, steps: int) -> dict[str, Any]:
    """What holds of every run that has ended well; its summary."""
    summary = json.loads(folder.summary.read_text())
    assert adds_up(summary)
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    assert summary["replay_identical"] is True
    of_steps = metrics(folder, "step")
    assert [step["step"] for step in of_steps] == list(range(1, steps + 1))
    assert sum(step["rows"] for step in of_steps) > 0
    assert all(step["mismatch_max"] < 1e-4 for step in of_steps if step["rows"])  # as of the embedded engine
    assert versions(folder) == {step: {step} if step < steps - 1 else {step, steps} for step in range(steps)}
    return summary


def check_nothing_is_left(folder: RunFolder, took_part: list[int], shared: set[int]) -> None:
    assert processes_that_name(str(folder.path.parent)) == []
    assert [name_of(pid) for pid in took_part if is_running(pid)] == []
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()
    assert shared & inodes() == set()


def of_memory(folder: RunFolder) -> list[str]:
    """What became of the server's memory, and when weights had come."""
    entries = map(json.loads, (folder.logs / "generator-0.jsonl").read_text().splitlines())
    told = ("memory.released", "memory.resumed", "weights.loaded")
    return [entry.get("part", entry["event"]) for entry in entries if entry["event"] in told]


@pytest.mark.parametrize(("way", "colocate"), [("disk", True), ("tensor", False), ("group", False)])
def test_new_weights_reach_the_server_and_the_run_ends_well(
    tmp_path: Path, cold_start: RunFolder, way: str, colocate: bool
) -> None:
    settings = ("rl.steps=2", f"sglang.weights={way}", "sglang.bucket_mib=1", "sglang.port=31040")
    settings += ("sglang.colocate=true",) if colocate else ()
    with launch(tmp_path, *SERVED, *settings, *from_cold_start_of(cold_start)) as process:
        folder = RunFolder(tmp_path / "demo")
        try:
            until(lambda: bool(metrics(folder, "step")), process, PATIENCE_S)
            took_part = family(process.pid)
            shared = set(shared_by(took_part))
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    check(folder, steps=2)
    loaded = [entry["version"] for entry in said(folder, "weights.loaded", "generator-0")]
    assert loaded == [0, 1, 2]
    lent = ["memory.released", "weights", "kv_cache"] if colocate else []
    assert of_memory(folder) == [*lent, "weights.loaded"] * 3
    assert "sglang-0.log" in {path.name for path in folder.logs.iterdir()}
    assert lives(folder, "generator-0")[1:] == []
    check_nothing_is_left(folder, took_part, shared)


def test_a_server_that_is_killed_in_the_middle_of_a_step_costs_no_trajectory(
    tmp_path: Path, cold_start: RunFolder
) -> None:
    with launch(tmp_path, *SERVED, "rl.steps=3", "sglang.port=31050", *from_cold_start_of(cold_start)) as process:
        folder = RunFolder(tmp_path / "demo")
        try:
            until(lambda: is_generating(folder, version=1), process, PATIENCE_S)
            took_part = family(process.pid)
            [scheduler] = schedulers(process.pid)
            shared = set(shared_by(took_part))
            os.kill(scheduler, signal.SIGKILL)
            until(lambda: len(metrics(folder, "step")) >= 2, process, PATIENCE_S)
            took_part += family(process.pid)
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    check(folder, steps=3)
    assert len(said(folder, "server.died", "generator-0")) == 1
    assert len(lives(folder, "generator-0")) == 2
    assert said(folder, "turn.failed", "generator-0") == []
    check_nothing_is_left(folder, took_part, shared)
