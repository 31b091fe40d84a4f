"""Runs real processes with the faults of a plan, and resumes the run after a kill of the whole run."""

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from asterism.bus.addresses import LEARNER
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import COLD_START, from_cold_start_of, launch, list_process_ids, whole_run
from tests.chaos.plans import HEARTBEAT_TIMEOUT_S, LAUNCHER, NUM_ENGINES, NUM_EXECUTORS, RANK_TARGETS, Fault
from tests.processes import family, processes_that_name

STEPS, QUESTIONS = 4, 8
SETTINGS = (
    *(
        f"rl.steps={STEPS}",
        "rl.prompts=4",
        "rl.rollouts=8",
        "rl.max_refill_groups=2",
        f"evaluation.questions={QUESTIONS}",
    ),
    *(f"engine.num_engines={NUM_ENGINES}", f"sandbox.executors={NUM_EXECUTORS}", "learner.checkpoints.every=2"),
    *(
        "supervision.heartbeat_s=0.5",
        f"supervision.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}",
        "supervision.first_heartbeat_timeout_s=90",  # a fault can stop a process that is starting
        "supervision.restarts=9",
    ),
    "determinism=strict",
)
TIMEOUT_S = 300.0
EXIT_TIMEOUT_S = 10.0


class PlayResult(msgspec.Struct):
    folder: RunFolder
    where: str
    launches: int
    exit_code: int
    output: str
    history: list[str]
    leftovers: list[str]  # remaining processes and files, and nodes that ended unexpectedly


class Baseline(NamedTuple):
    """A run without faults, from the common cold start."""

    cold_start: RunFolder
    folder: RunFolder
    num_events: int  # number of events in the head's log


class Scene(Protocol):
    """The machine or hosts of a run."""

    @property
    def folder(self) -> RunFolder: ...

    @property
    def where(self) -> str: ...

    def start(self, *, resume: bool) -> None: ...

    def has_ended(self) -> bool:
        """Return whether the run has ended. End the faults that are due to end."""
        ...

    def hit(self, fault: Fault) -> str:
        """Inject the fault. Return a description of its target."""
        ...

    def finish(self) -> tuple[int, str, list[str]]:
        """End the run if necessary. Return its exit code, output and leftovers."""
        ...


def run_cold_start(runs: Path) -> RunFolder:
    return whole_run(runs, *SETTINGS, "rl.steps=0", "evaluation.questions=0", *COLD_START)[0]


def run_baseline(cold_start: RunFolder, runs: Path, ranks: int = 1) -> Baseline:
    settings = (*SETTINGS, *from_cold_start_of(cold_start), f"learner.ranks={ranks}")
    folder, _ = whole_run(runs / f"undisturbed-{ranks}", *settings)
    return Baseline(cold_start, folder, count_events(folder))


def count_events(folder: RunFolder) -> int:
    """Count the events in the head's log."""
    path = folder.events / "head.sqlite"
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return int(connection.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()[0])
    except sqlite3.Error:  # the log is being created
        return 0
    finally:
        connection.close()


def play(scene: Scene, faults: Sequence[Fault]) -> PlayResult:
    """Play the faults, then wait until the run has ended."""
    result = PlayResult(scene.folder, scene.where, 1, -1, "", [], [])
    began = time.monotonic()
    try:
        scene.start(resume=False)
        for fault in faults:
            if not _wait_for(fault, scene):
                break
            target = scene.hit(fault)
            result.history.append(f"{time.monotonic() - began:7.2f} s  {fault}: {target}")
            if fault.ends_the_run:
                _wait_until_ended(scene)
                result.launches += 1
                scene.start(resume=scene.folder.config.exists())
        _wait_until_ended(scene)
    except TimeoutError:
        result.history.append(f"{time.monotonic() - began:7.2f} s  the run did not end in time")
    finally:
        result.exit_code, result.output, result.leftovers = scene.finish()
    return result


def _wait_until_ended(scene: Scene) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not scene.has_ended():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)  # interval of polling


def _wait_for(fault: Fault, scene: Scene) -> bool:
    """Wait for the fault's moment. Return False if the run ends before."""
    start, events = time.monotonic(), count_events(scene.folder)
    while not scene.has_ended():
        due_s = fault.after_s if fault.after_events < 0 else TIMEOUT_S
        if time.monotonic() - start >= due_s:
            return True
        if fault.after_events >= 0 and count_events(scene.folder) - events >= fault.after_events:
            return True
        time.sleep(0.01)
    return False


class OneMachine:
    """A run on this machine only."""

    def __init__(self, cold_start: RunFolder, runs: Path, ranks: int = 1) -> None:
        """`ranks` is the number of learner ranks."""
        runs.mkdir(exist_ok=True)
        self.where = "one machine" if ranks == 1 else f"one machine, {ranks} learner ranks"
        self.folder = RunFolder(runs / "demo")
        self._runs = runs
        self._settings = (*SETTINGS, *from_cold_start_of(cold_start), f"learner.ranks={ranks}")
        self._output = runs / "run.txt"

    def start(self, *, resume: bool) -> None:
        with self._output.open("a") as output:
            self._process = launch(self._runs, *self._settings, *(["--resume"] if resume else []), output=output)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def hit(self, fault: Fault) -> str:
        if fault.target == LAUNCHER:
            pid: int | None = self._process.pid
        elif fault.target in RANK_TARGETS:
            pid = _find_rank(self.folder, RANK_TARGETS.index(fault.target))
        else:
            pid = _find_pid(self.folder, fault.target)
        return signal_process(pid, fault)

    def finish(self) -> tuple[int, str, list[str]]:
        self._process.kill()
        self._process.wait()
        return self._process.returncode, self._output.read_text(), list(find_leftovers(self.folder))


def signal_process(pid: int | None, fault: Fault) -> str:
    if pid is None:
        return "not there"
    try:
        os.kill(pid, signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
    except ProcessLookupError:
        return f"{pid} had exited"
    return str(pid)


def _find_pid(folder: RunFolder, target: str) -> int | None:
    """Return the process id of the target's present incarnation."""
    started = list_process_ids(folder, target)
    return started[-1] if started else None


def _find_rank(folder: RunFolder, rank: int) -> int | None:
    """Return the process id of a rank that the agent of the learner's present incarnation has started."""
    agent = _find_pid(folder, LEARNER)
    for pid in family(agent)[1:] if agent is not None else ():
        with contextlib.suppress(OSError):  # the process has exited
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def find_leftovers(folder: RunFolder) -> Iterator[str]:
    """Yield processes, sockets and shared memory that are left after EXIT_TIMEOUT_S."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while (processes := processes_that_name(str(folder.path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    if processes:
        yield f"processes are left: {processes}"
    for path in (folder.sockets, folder.shared_memory):
        if path.exists():
            yield f"{path} is left"
