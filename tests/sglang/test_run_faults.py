"""Whole runs whose SGLang server fails in the middle of a step: killed, stopped, and started again by somebody else.

No trajectory is lost to any of it: what was under way is asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from tests.actors.running import finish, from_cold_start_of, launch, lives, said, until
from tests.processes import family
from tests.sglang.bench import Shared
from tests.sglang.runs import (
    OWN_SERVER,
    PATIENCE_S,
    attached_to,
    check,
    check_nothing_is_left,
    loaded,
    name_of,
    shared_by,
    stop_in_a_step,
    turns_under_way,
)

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

SCHEDULER = "sglang::scheduler"
STOPPED_S = 3.0  # less than the run waits for an answer
GROUPS = ("rl.prompts=4", "rl.rollouts=8")


def scheduler_of(launcher: subprocess.Popen[str]) -> int:
    """Of the run's own server. Its process group is the server's."""
    [scheduler] = [pid for pid in family(launcher.pid) if name_of(pid) == SCHEDULER]
    return scheduler


def died(folder: RunFolder) -> list[str]:
    return [entry["how"] for entry in said(folder, "server.died", "generator-0")]


def check_faults_cost_nothing(folder: RunFolder, steps: int) -> None:
    check(folder, steps)
    assert said(folder, "turn.failed", "generator-0") == []
    assert set(loaded(folder)) == set(range(steps + 1))
    assert loaded(folder) == sorted(loaded(folder))


def test_another_server_takes_the_place_of_one_that_is_killed_and_of_one_that_is_stopped(
    tmp_path: Path, cold_start: RunFolder
) -> None:
    settings = (*GROUPS, "rl.steps=4", "sglang.port=31050", "sglang.ready_s=3")
    with launch(tmp_path, *OWN_SERVER, *settings, *from_cold_start_of(cold_start)) as process:
        folder = RunFolder(tmp_path / "demo")
        try:
            until(lambda: turns_under_way(folder, at_least=1) > 0, process, PATIENCE_S)
            took_part = family(process.pid)
            killed = scheduler_of(process)
            stop_in_a_step(os.getpgid(killed), folder, 1, process)
            shared = set(shared_by(took_part))
            os.kill(killed, signal.SIGKILL)
            until(lambda: len(lives(folder, "generator-0")) == 2, process, PATIENCE_S)
            until(lambda: 2 in loaded(folder), process, PATIENCE_S)
            took_part += family(process.pid)
            stop_in_a_step(os.getpgid(scheduler_of(process)), folder, 2, process)
            shared |= set(shared_by(took_part))
            until(lambda: 3 in loaded(folder), process, PATIENCE_S)
            took_part += family(process.pid)
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    check_faults_cost_nothing(folder, steps=4)
    assert died(folder) == [f"lost its process {SCHEDULER}", "does not answer any more"]
    assert len(lives(folder, "generator-0")) == 3
    check_nothing_is_left(folder, took_part, shared)


def test_a_server_of_somebody_else_may_stand_still_for_a_while_and_be_started_again(
    tmp_path: Path, cold_start: RunFolder, servers: tuple[Shared, Shared], loop: asyncio.Runner
) -> None:
    shared, _ = servers
    attached = attached_to(shared.server.url)
    group = os.getpgid(min(shared.server.processes()))
    with launch(tmp_path, *attached, *GROUPS, "rl.steps=4", *from_cold_start_of(cold_start)) as process:
        folder = RunFolder(tmp_path / "demo")
        try:
            stop_in_a_step(group, folder, 1, process)
            time.sleep(STOPPED_S)
            os.killpg(group, signal.SIGCONT)
            until(lambda: 2 in loaded(folder), process, PATIENCE_S)
            assert len(lives(folder, "generator-0")) == 1
            stop_in_a_step(group, folder, 2, process)
            loop.run(shared.close())
            loop.run(shared.start())
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
            with contextlib.suppress(ProcessLookupError):  # other tests need it
                os.killpg(group, signal.SIGCONT)
    assert process.returncode == 0, output
    check_faults_cost_nothing(folder, steps=4)
    assert died(folder) == ["silent"]
    assert len(lives(folder, "generator-0")) == 2
