"""Playing one plan: a run over real processes, hit as planned, resumed where all of it was killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from configs.run_folder import RunFolder
from tests.actors.running import COLD_START, from_cold_start_of, launch, said, whole_run
from tests.chaos.plans import LAUNCHER, NUM_ENGINES, NUM_EXECUTORS, SILENT_S, Fault

STEPS, QUESTIONS = 4, 8
SETTINGS = (
    *(f"rl.steps={STEPS}", "rl.prompts=4", "rl.rollouts=8", "rl.refills=2", f"evaluation.questions={QUESTIONS}"),
    *(f"engine.num_engines={NUM_ENGINES}", f"sandbox.executors={NUM_EXECUTORS}", "learner.checkpoint_every=2"),
    *("supervision.heartbeat_s=0.5", f"supervision.silent_s={SILENT_S}", "supervision.restarts=9"),
    "determinism=strict",
)
PATIENCE_S = 300.0
GONE_WITHIN_S = 10.0


class Played(msgspec.Struct):
    folder: RunFolder
    where: str
    launches: int
    exit_code: int
    output: str
    history: list[str]
    left: list[str]  # what was left of it, and who took part and ended as nobody should


class Undisturbed(NamedTuple):
    """A run that nobody disturbs, from the cold start that all have in common."""

    cold_start: RunFolder
    folder: RunFolder
    num_events: int  # of its head


class Scene(Protocol):
    """Where a run takes place."""

    @property
    def folder(self) -> RunFolder: ...

    @property
    def where(self) -> str: ...

    def start(self, *, resume: bool) -> None: ...

    def ended(self) -> bool:
        """Whether the run has. Does what has become due: pauses end here."""
        ...

    def hit(self, fault: Fault) -> str:
        """Whom it met."""
        ...

    def finish(self) -> tuple[int, str, list[str]]:
        """Exit code, output, and what is left, once the run has ended or is to be ended."""
        ...


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


def play(scene: Scene, faults: Sequence[Fault]) -> Played:
    """To the end of the run, whatever it is."""
    played = Played(scene.folder, scene.where, 1, -1, "", [], [])
    began = time.monotonic()
    try:
        scene.start(resume=False)
        for fault in faults:
            if not _wait_for(fault, scene):
                break
            hit = scene.hit(fault)
            played.history.append(f"{time.monotonic() - began:7.2f} s  {fault}: {hit}")
            if fault.ends_the_run:
                _until_ended(scene)
                played.launches += 1
                scene.start(resume=scene.folder.config.exists())
        _until_ended(scene)
    except TimeoutError:
        played.history.append(f"{time.monotonic() - began:7.2f} s  it never ended")
    finally:
        played.exit_code, played.output, played.left = scene.finish()
    return played


def _until_ended(scene: Scene) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not scene.ended():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)  # other processes move, not this one


def _wait_for(fault: Fault, scene: Scene) -> bool:
    """Whether its moment came before the run ended."""
    start, events = time.monotonic(), num_events(scene.folder)
    while not scene.ended():
        due_s = fault.after_s if fault.after_events < 0 else PATIENCE_S
        if time.monotonic() - start >= due_s:
            return True
        if fault.after_events >= 0 and num_events(scene.folder) - events >= fault.after_events:
            return True
        time.sleep(0.01)
    return False


class OneMachine:
    """All of the run on this one."""

    where = "one machine"

    def __init__(self, cold_start: RunFolder, runs: Path) -> None:
        runs.mkdir(exist_ok=True)
        self.folder = RunFolder(runs / "demo")
        self._runs = runs
        self._settings = (*SETTINGS, *from_cold_start_of(cold_start))
        self._output = runs / "run.txt"

    def start(self, *, resume: bool) -> None:
        with self._output.open("a") as output:
            self._process = launch(self._runs, *self._settings, *(["--resume"] if resume else []), output=output)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def hit(self, fault: Fault) -> str:
        pid = self._process.pid if fault.target == LAUNCHER else _present(self.folder, fault.target)
        return signalled(pid, fault)

    def finish(self) -> tuple[int, str, list[str]]:
        self._process.kill()
        self._process.wait()
        return self._process.returncode, self._output.read_text(), list(left_over(self.folder))


def signalled(pid: int | None, fault: Fault) -> str:
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


def left_over(folder: RunFolder) -> Iterator[str]:
    """Of processes, sockets and shared memory, once all had a while to go."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (processes := list(_processes_of(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    if processes:
        yield f"processes are left: {processes}"
    for path in (folder.sockets, folder.shared_memory):
        if path.exists():
            yield f"{path} is left"


def _processes_of(folder: RunFolder) -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(folder.path).encode() in words and state != "Z":
                yield f"{entry.name}: {b' '.join(words).decode(errors='replace')[:200]}"
