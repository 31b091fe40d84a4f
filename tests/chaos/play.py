"""Playing one plan: a run over real processes, hit as planned, resumed where all of it was killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from configs.run_folder import RunFolder
from tests.actors.running import COLD_START, from_cold_start_of, launch, said, whole_run
from tests.chaos.plans import EVERYTHING, NUM_ENGINES, NUM_EXECUTORS, Fault

STEPS, QUESTIONS = 4, 8
SETTINGS = (
    *(f"rl.steps={STEPS}", "rl.prompts=4", "rl.rollouts=8", "rl.refills=2", f"evaluation.questions={QUESTIONS}"),
    *(f"engine.num_engines={NUM_ENGINES}", f"sandbox.executors={NUM_EXECUTORS}", "learner.checkpoint_every=2"),
    *("supervision.heartbeat_s=0.5", "supervision.silent_s=6", "supervision.restarts=9", "determinism=strict"),
)
PATIENCE_S = 240.0


class Played(msgspec.Struct):
    folder: RunFolder
    launches: int
    exit_code: int
    output: str
    history: list[str]


class Undisturbed(NamedTuple):
    """A run that nobody disturbs, from the cold start that all have in common."""

    cold_start: RunFolder
    folder: RunFolder
    num_events: int  # of its head


def undisturbed(runs: Path) -> Undisturbed:
    cold = ("rl.steps=0", "evaluation.questions=0", *COLD_START)
    cold_start, _ = whole_run(runs / "cold", *SETTINGS, *cold)
    folder, _ = whole_run(runs / "undisturbed", *SETTINGS, *from_cold_start_of(cold_start))
    return Undisturbed(cold_start, folder, num_events(folder))


def num_events(folder: RunFolder) -> int:
    """In the head's log."""
    path = folder.events / "head.sqlite"
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
    except sqlite3.Error:  # it is being made
        return 0
    finally:
        connection.close()


def play(cold_start: RunFolder, runs: Path, faults: Sequence[Fault]) -> Played:
    """To the end of the run, whatever it is."""
    settings = (*SETTINGS, *from_cold_start_of(cold_start))
    folder = RunFolder(runs / "demo")
    played = Played(folder, 1, -1, "", [])
    began = time.monotonic()
    process = launch(runs, *settings)
    try:
        for fault in faults:
            if not _wait_for(fault, process, folder):
                break
            hit = _hit(fault, process, folder)
            played.history.append(f"{time.monotonic() - began:7.2f} s  {fault}: {hit}")
            if fault.target == EVERYTHING:
                played.output += process.communicate(timeout=PATIENCE_S)[0]
                played.launches += 1
                process = launch(runs, *settings, *(["--resume"] if folder.config.exists() else []))
        played.output += process.communicate(timeout=PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        played.history.append(f"{time.monotonic() - began:7.2f} s  it never ended")
    finally:
        process.kill()
        process.wait()
    played.exit_code = process.returncode
    return played


def _wait_for(fault: Fault, process: subprocess.Popen[str], folder: RunFolder) -> bool:
    """Whether its moment came before the run ended."""
    start, events = time.monotonic(), num_events(folder)
    while process.poll() is None:
        due_s = fault.after_s if fault.after_events < 0 else PATIENCE_S
        if time.monotonic() - start >= due_s:
            return True
        if fault.after_events >= 0 and num_events(folder) - events >= fault.after_events:
            return True
        time.sleep(0.01)
    return False


def _hit(fault: Fault, process: subprocess.Popen[str], folder: RunFolder) -> str:
    pid = process.pid if fault.target == EVERYTHING else _present(folder, fault.target)
    if pid is None:
        return "not there"
    try:
        os.kill(pid, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
    except ProcessLookupError:
        return f"{pid} was gone"
    return str(pid)


def _present(folder: RunFolder, target: str) -> int | None:
    """Process id of the target's present life."""
    started = [entry["pid"] for entry in said(folder, "process.started") if entry["name"] == target.partition(" ")[0]]
    if not started:
        return None
    return _child_of(started[-1]) if target.endswith(" rank") else started[-1]


def _child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    numbers = children.read_text().split() if children.exists() else []
    return int(numbers[0]) if numbers else None
