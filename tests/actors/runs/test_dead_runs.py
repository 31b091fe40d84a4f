"""The start of a run removes the leftovers of a dead run, however that run died."""

import asyncio
import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.actors.launch.claim_run_folder import claimed_run_folder
from asterism.bus.process.scratch_lock import has_owner_ended, name_scratch
from asterism.configs.schema.run_config import RunConfig
from asterism.sandbox.hosts.docker.docker_api import DockerEngine
from asterism.sandbox.hosts.docker.docker_host import remove_stale_containers
from asterism.sandbox.hosts.docker.docker_probe import get_engine_address
from tests.actors.runs.running import ROOT, Start, wait_until_exited
from tests.processes import family

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def hangups_end_processes() -> Iterator[None]:
    """Restore the default of SIGHUP: tests that were started with nohup ignore it, and so do their children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def list_held(processes: list[int]) -> set[Path]:
    """Return the scratch folders locked by these processes."""
    held: set[Path] = set()
    for pid in processes:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(FileNotFoundError):
                path = fd.readlink()
                if path.parent.name.startswith(name_scratch("")):
                    held.add(path.parent)
    return held


async def count_stale_containers() -> int:
    engine = DockerEngine(get_engine_address(os.environ))
    try:
        return sum(has_owner_ended(container.owner) for container in await engine.list_owned())
    finally:
        await engine.close()


def start_next_run(runs: Path) -> None:
    """Start another run, up to its processes."""
    run = RunConfig(name="next", runs_folder=str(runs))
    with claimed_run_folder(run, resume=False, overwrite=False):
        pass


def play_death(start_trained: Start, how: str, *settings: str) -> set[Path]:
    """Kill a run after its first evaluation, and return its scratch folders."""
    run = start_trained(*settings)
    run.wait_for("evaluation")
    process, processes = run.process, family(run.process.pid)
    held = list_held(processes)
    assert {run.folder.sockets, run.folder.shared_memory} < held
    match how:
        case "hangup":
            process.send_signal(signal.SIGHUP)
        case _:
            for number in (signal.SIGSTOP, signal.SIGKILL):  # all stop first, so that none reacts to a death
                for pid in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
    run.end(130 if how == "hangup" else -9)
    wait_until_exited(processes)
    return held


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["hangup", "all"])
def test_nothing_of_a_dead_run_is_left_after_the_next_start(tmp_path: Path, start_trained: Start, how: str) -> None:
    held = play_death(start_trained, how)
    if how != "hangup":
        start_next_run(tmp_path)
    assert [path for path in held if path.exists()] == []


# test_docker_host.py has a dead executor with containers, and test_determinism.py a run with a dead launcher.
@pytest.mark.nightly
@pytest.mark.docker
def test_no_container_of_a_dead_run_is_left_after_the_next_start(tmp_path: Path, start_trained: Start) -> None:
    held = play_death(start_trained, "all", "sandbox.backend=docker")
    start_next_run(tmp_path)
    asyncio.run(remove_stale_containers())
    assert [path for path in held if path.exists()] == []
    assert asyncio.run(count_stale_containers()) == 0


# This program runs `asterism run` with a launcher that ends at once, and a replay that waits for a signal.
_LAST_STAGE = """
import signal, sys
from asterism.actors.cli import main
from asterism.actors.launch.launcher import Launcher
from asterism.actors.replay.verification import RunVerifier

async def finish(launcher):
    return "finished"

def replay(verifier, show):
    print("waiting", flush=True)
    while True:
        signal.pause()

Launcher.launch, RunVerifier.finish = finish, replay
sys.argv[1:] = ["run", "configs/tiny.toml", "--set", f"runs_folder={sys.argv[1]}"]
main.main()
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(theirs)


@pytest.mark.parametrize("how", ["signal", "terminal"])
def test_a_lost_terminal_during_the_replay_ends_the_run_cleanly(
    tmp_path: Path, terminal: tuple[int, int], how: str
) -> None:
    ours, theirs = terminal
    command = [sys.executable, "-c", _LAST_STAGE, str(tmp_path)]
    with subprocess.Popen(["setsid", "--ctty", *command], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as run:
        output = b""
        while b"waiting" not in output:
            assert run.poll() is None, output
            if select.select([ours], [], [], 0.1)[0]:
                output += os.read(ours, 4096)
        held = list_held([run.pid])
        assert len(held) == 2
        if how == "signal":
            run.send_signal(signal.SIGHUP)
        else:
            os.close(ours)
        assert run.wait(60) == 130
    if how == "signal":
        assert b"interrupted" in os.read(ours, 4096)
        os.close(ours)
    assert [path for path in held if path.exists()] == []
