"""Settings of whole runs on real SGLang servers, and checks of their results."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asterism.actors.generator import REPORT_INTERVAL_S
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    finish,
    launch,
    metrics,
    read_conserved_summary,
    read_log_entries,
    read_token_versions,
    wait_until,
)
from tests.processes import is_running, processes_that_name
from tests.sglang.environment import PYTHON

PATIENCE_S = 1500.0  # a start takes a minute on two idle cores, and longer on busy ones
_ENGINE = (
    "engine.kind=sglang",
    "engine.kv_tokens=8192",
    "engine.max_running=16",
    f"sglang.startup_timeout_s={PATIENCE_S}",
)
_SHORT = ("learner.checkpoints.every=100", "evaluation.questions=0")
OWN_SERVER = (
    *(*_ENGINE, *_SHORT, f'sglang.python="{PYTHON}"'),
    'sglang.arguments=["--enable-deterministic-inference"]',
)


@contextlib.contextmanager
def running(runs: Path, *settings: str) -> Iterator[tuple[subprocess.Popen[str], RunFolder]]:
    """Launch a run; at the end of the block, wait until the run has succeeded."""
    with launch(runs, *settings) as process:
        try:
            yield process, RunFolder(runs / "demo")
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output


def attach_to(url: str) -> tuple[str, ...]:
    return (*_ENGINE, *_SHORT, f'sglang.external_urls=["{url}"]')


def count_running_turns(folder: RunFolder, at_least: int, after: int = 0) -> int:
    """Return the number of running turns in the last load report. Return 0 before version `at_least`, or if
    there are at most `after` reports."""
    loads = read_log_entries(folder, "engine.load", "generator-0")
    return loads[-1]["running"] if len(loads) > after and loads[-1]["version"] >= at_least else 0


def stop_in_a_step(group: int, folder: RunFolder, at_least: int, launcher: subprocess.Popen[str]) -> None:
    """Stop the server's process group while turns run, and check with load reports that turns run."""
    while True:
        wait_until(lambda: count_running_turns(folder, at_least) > 0, launcher, PATIENCE_S)
        os.killpg(group, signal.SIGSTOP)
        before = len(read_log_entries(folder, "engine.load", "generator-0"))
        time.sleep(4 * REPORT_INTERVAL_S)
        if count_running_turns(folder, at_least, after=before + 1) > 0:  # the first report can be older
            return
        os.killpg(group, signal.SIGCONT)  # the server was stopped between two steps


def get_process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    return ""


def find_shared_memory(pids: list[int]) -> Iterator[int]:
    """Yield the inodes of the shared memory files that the processes map."""
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has exited
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            yield from (int(line.split()[4]) for line in lines if "/dev/shm/" in line)


def is_shared_memory_left(inodes: set[int]) -> bool:
    return not inodes.isdisjoint({entry.inode() for entry in os.scandir("/dev/shm")})


def check_run_result(folder: RunFolder, steps: int) -> dict[str, Any]:
    """Check a successful run and return its summary."""
    summary = read_conserved_summary(folder)
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    steps_logged = metrics(folder, "step")
    assert [step["step"] for step in steps_logged] == list(range(1, steps + 1))
    assert sum(step["rows"] for step in steps_logged) > 0
    assert all(step["mismatch_max"] < 1e-4 for step in steps_logged if step["rows"])  # as in the embedded engine
    assert read_token_versions(folder) == {step: {step} for step in range(steps)}
    return summary


def get_loaded_versions(folder: RunFolder) -> list[int]:
    """Return the weight versions in the order in which the engine loaded them."""
    return [entry["version"] for entry in read_log_entries(folder, "weights.loaded", "generator-0")]


def check_cleanup(folder: RunFolder, processes: list[int], shared: set[int]) -> None:
    """Check that no process, socket or shared memory is left. `shared`: inodes of named shared memory."""
    assert processes_that_name(str(folder.path.parent)) == []
    assert [get_process_name(pid) for pid in processes if is_running(pid)] == []
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()
    assert not is_shared_memory_left(shared)
