"""Fixtures for all suites: a finished run, and functions that start runs."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import COLD_START, PATIENCE_S, Start, StartedRun, from_cold_start_of, whole_run


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Yield a function that starts runs; kill the runs that still run after the module's last test."""
    started: list[StartedRun] = []

    def start_one(runs: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> StartedRun:
        started.append(StartedRun(runs, *arguments, environment=environment))
        return started[-1]

    yield start_one
    for run in started:
        run.process.kill()
        run.process.communicate()


@pytest.fixture
def start_trained(tmp_path: Path, start: Start, finished: RunFolder) -> Start:
    """Return a function that starts runs in the test's folder, from the cold start of the finished run."""
    return lambda *arguments, **options: start(tmp_path, *from_cold_start_of(finished), *arguments, **options)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """Return a finished run and its output. Some leases of the run wait, because the KV cache is small."""
    settings = ("rl.prompts=6", "rl.rollouts=8", "log.curves=true", "engine.kv_tokens=1600")
    return make_once(tmp_path_factory, "finished_run", *settings)


def make_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, *settings: str, patience_s: float = PATIENCE_S
) -> tuple[RunFolder, str]:
    """Return a run and its output. Workers of pytest-xdist share one run: the first that needs it makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    runs, printed = shared / name, shared / f"{name}.txt"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            printed.write_text(whole_run(runs, *COLD_START, *settings, patience_s=patience_s)[1])
    return RunFolder(runs / "demo"), printed.read_text()


@pytest.fixture(scope="session")
def finished(finished_run: tuple[RunFolder, str]) -> RunFolder:
    return finished_run[0]
