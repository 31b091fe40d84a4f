"""These fixtures of whole runs, for all suites, are a finished run and a starter of runs."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import COLD_START, Start, launch, whole_run


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Yield a function that starts runs; runs that remain after the module's last test are killed."""
    started: list[subprocess.Popen[str]] = []

    def launch_one(runs: Path, *arguments: str) -> subprocess.Popen[str]:
        started.append(launch(runs, *arguments))
        return started[-1]

    yield launch_one
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """Return a finished run and its output. Workers of pytest-xdist share one run: the first that needs it makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    runs, printed = shared / "finished_run", shared / "finished_run.txt"
    with (shared / "finished_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            printed.write_text(whole_run(runs, *COLD_START, "rl.prompts=8", "rl.rollouts=16")[1])
    return RunFolder(runs / "demo"), printed.read_text()
