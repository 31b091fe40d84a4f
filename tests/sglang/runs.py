"""Whole runs on real SGLang servers: what they are set to, and what holds of each when it has ended well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from actors.generator import REPORT_EVERY_S
from configs.run_folder import RunFolder
from tests.actors.running import adds_up, metrics, said, until, versions
from tests.processes import is_running, processes_that_name
from tests.sglang.environment import PYTHON
from tests.sglang.serving import SHIMS

PATIENCE_S = 1500.0  # a server takes a minute to start on two idle cores
_ENGINE = ("engine.kind=sglang", "engine.kv_tokens=8192", "engine.max_running=16", f"sglang.start_s={PATIENCE_S}")
_SHORT = ("learner.checkpoint_every=100", "evaluation.questions=0")
OWN_SERVER = (
    *(*_ENGINE, *_SHORT, f'sglang.python="{PYTHON}"', f'sglang.environment={{PYTHONPATH="{SHIMS}"}}'),
    'sglang.arguments=["--enable-deterministic-inference"]',
)


def attached_to(url: str) -> tuple[str, ...]:
    return (*_ENGINE, *_SHORT, f'sglang.attach=["{url}"]')


# ---------------------------------------------------------------- while it goes on


def turns_under_way(folder: RunFolder, at_least: int, after: int = 0) -> int:
    """How many there were at the last report of the load, under so new a version; 0 if there are no more reports than
    `after`."""
    loads = said(folder, "engine.load", "generator-0")
    return loads[-1]["running"] if len(loads) > after and loads[-1]["version"] >= at_least else 0


def stop_in_a_step(group: int, folder: RunFolder, at_least: int, launcher: subprocess.Popen[str]) -> None:
    """Stops the server's processes while turns are under way: then its load is reported as time goes by."""
    while True:
        until(lambda: turns_under_way(folder, at_least) > 0, launcher, PATIENCE_S)
        os.killpg(group, signal.SIGSTOP)
        before = len(said(folder, "engine.load", "generator-0"))
        time.sleep(4 * REPORT_EVERY_S)
        if turns_under_way(folder, at_least, after=before + 1) > 0:  # the first report may be of the time before
            return
        os.killpg(group, signal.SIGCONT)  # between two steps


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").strip()
    return ""


def shared_by(pids: list[int]) -> Iterator[int]:
    """The inodes of shared memory that the processes have mapped."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended in between
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            yield from (int(line.split()[4]) for line in lines if "/dev/shm/" in line)


# ---------------------------------------------------------------- when it has ended


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
    assert versions(folder) == {step: {step} for step in range(steps)}
    return summary


def loaded(folder: RunFolder) -> list[int]:
    """The versions that the engine was given, one after the other."""
    return [entry["version"] for entry in said(folder, "weights.loaded", "generator-0")]


def check_nothing_is_left(folder: RunFolder, took_part: list[int], shared: set[int]) -> None:
    """`shared` is shared memory that has a name, by inodes."""
    assert processes_that_name(str(folder.path.parent)) == []
    assert [name_of(pid) for pid in took_part if is_running(pid)] == []
    assert not folder.sockets.exists()
    assert not folder.shared_memory.exists()
    assert shared & {path.stat().st_ino for path in Path("/dev/shm").iterdir()} == set()
