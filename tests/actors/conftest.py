"""Runs that several suites look at, and how they start their own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from tests.actors.running import COLD_START, Start, launch, whole_run


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a run; whatever a test leaves running is ended after the last one."""
    started: list[subprocess.Popen[str]] = []

    def launch_one(runs: Path, *words: str) -> subprocess.Popen[str]:
        started.append(launch(runs, *words))
        return started[-1]

    yield launch_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """With what it printed."""
    return whole_run(tmp_path_factory.mktemp("runs"), *COLD_START, "rl.prompts=8", "rl.rollouts=16")
