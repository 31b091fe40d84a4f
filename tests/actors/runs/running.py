"""Start small runs with real processes, wait for them, and read their files."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import StepRequested, TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from tests.processes import is_running

ROOT = Path(__file__).parents[3]
ASTERISM = (sys.executable, "-m", "asterism.actors.cli.main")
SMALL = (
    "prepare.parameters={num_train_questions = 64, num_test_questions = 16, num_sft_dialogues = 200}",
    *("sft.steps=4", "sft.batch_size=16", "rl.steps=3", "rl.prompts=2", "rl.rollouts=4"),
    *("learner.checkpoints.every=1", "learner.threads=1", "evaluation.questions=6"),
    *("sandbox.backend=process", "sandbox.spare_notebooks=8", "log.curves=false"),  # matplotlib is slow to import
)
# This policy is right in 10 to 20 % of its answers, so that RL steps change weights and reject some groups. With the
# demo's behaviors, which are mostly wrong, this takes three times as many dialogues.
COLD_START = (
    *("sft.steps=130", "sft.batch_size=16", "prepare.parameters.num_sft_dialogues=2080"),
    "prepare.parameters.behaviors={clean = 0.4, repaired = 0.3, wrong = 0.15, gives_up = 0.1, guess = 0.05}",
)
PATIENCE_S = 240.0
M = TypeVar("M")  # kind of message


def from_cold_start_of(made: RunFolder) -> tuple[str, ...]:
    """Return settings that start a run from the cold start of another run, with its data."""
    names = {"data.train": "train", "data.test": "test", "sft.data": "sft"}
    data = (f"{key}={made.data / name}.jsonl" for key, name in names.items())
    return ("sft.steps=0", f"model.checkpoint={made.get_checkpoint_path(0)}", *data)


def command_line(runs: Path, *arguments: str) -> list[str]:
    """Return the command of a small run in `runs`. Each argument is an option or a setting, KEY=VALUE."""
    settings = (*SMALL, f'runs_folder="{runs}"', *(argument for argument in arguments if not argument.startswith("--")))
    options = [argument for argument in arguments if argument.startswith("--")]
    overrides = [flag for setting in settings for flag in ("--set", setting)]
    return [*ASTERISM, "run", "configs/tiny.toml", *overrides, *options]


def launch(
    runs: Path,
    *arguments: str,
    output: IO[str] | int = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a small run in `runs`."""
    return start_command(command_line(runs, *arguments), output=output, environment=environment)


def start_command(
    command: Sequence[str], *, output: IO[str] | int = subprocess.PIPE, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> str:
    output, _ = process.communicate(timeout=patience_s)
    return output


def succeed(process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> str:
    """Return the output of a run, after a check that it succeeded."""
    output = finish(process, patience_s)
    assert process.returncode == 0, output
    return output


def whole_run(runs: Path, *arguments: str, patience_s: float = PATIENCE_S) -> tuple[RunFolder, str]:
    """Run a small run that must succeed, and return its folder and output."""
    with launch(runs, *arguments) as process:
        try:
            return RunFolder(runs / "demo"), succeed(process, patience_s)
        finally:
            process.kill()


def asterism(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ASTERISM, *arguments], cwd=ROOT, capture_output=True, text=True)


def asterism_output(*arguments: object, code: int = 0) -> str:
    """Return the output of a command that must exit with `code`."""
    done = asterism(*map(str, arguments))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)  # wait for other processes


def wait_until_empty(list_processes: Callable[[], Sequence[object]]) -> None:
    """Wait until the kernel has killed the processes, which it does soon after their parent's death."""
    deadline = time.monotonic() + 60.0
    while left := list_processes():
        assert time.monotonic() < deadline, f"still alive: {left}"
        time.sleep(0.02)  # wait for other processes


def wait_until_exited(processes: Sequence[int]) -> None:
    wait_until_empty(lambda: [pid for pid in processes if is_running(pid)])


class StartedRun:
    """A small run that a test has started, with its process and its folder."""

    def __init__(self, runs: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.process = RunFolder(runs / "demo"), launch(runs, *arguments, environment=environment)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, self.process)

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Wait until metrics.jsonl has `count` lines of a kind, such as "step"."""
        self.wait_until(lambda: len(metrics(self.folder, kind)) >= count)

    def signal(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the current incarnation of a process of the run."""
        os.kill(list_process_ids(self.folder, name)[-1], number)

    def kill(self) -> None:
        self.process.kill()
        finish(self.process)

    def end(self, code: int, patience_s: float = PATIENCE_S) -> str:
        """Return the output of the run, after a check of its exit code."""
        output = finish(self.process, patience_s)
        assert self.process.returncode == code, output
        return output

    def succeed(self, patience_s: float = PATIENCE_S) -> str:
        return self.end(0, patience_s)


Start = Callable[..., StartedRun]


def is_conserved(summary: dict[str, int], *more: str) -> bool:
    """Return whether every trajectory finished, failed, was abandoned, or had one of the endings in `more`."""
    ends = sum(summary[f"trajectories_{end}"] for end in ("finished", "failed", "abandoned", *more))
    return summary["trajectories_started"] == ends


def read_conserved_summary(folder: RunFolder, *more: str) -> dict[str, Any]:
    """Return the summary of a run that must have lost no trajectory (see `is_conserved`) and replay identically."""
    summary = json.loads(folder.summary.read_text())
    assert is_conserved(summary, *more), summary
    assert summary["replay_identical"] is True
    return summary


def metrics(folder: RunFolder, kind: str) -> list[dict[str, float]]:
    if not folder.metrics.exists():
        return []
    complete = [line for line in folder.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in map(json.loads, complete) if line["kind"] == kind]


def find_last_complete_step(folder: RunFolder) -> int:
    """Return the newest step with a checkpoint and a metrics line, from which the run resumes."""
    reported = {line["step"] for line in metrics(folder, "step")}
    return max(reported.intersection(list_saved_steps(folder.checkpoints)), default=0)


def read_log_entries(folder: RunFolder, event: str, process: str = "launcher") -> list[dict[str, Any]]:
    """Return the entries of one kind in the structured log of a process."""
    log = folder.logs / f"{process}.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in entries if entry["event"] == event]


def read_messages(folder: RunFolder, process: str, *kinds: type[M]) -> list[M]:
    """Return the messages of these kinds that a process received, in order."""
    events = read_events(folder.events / f"{process}.sqlite", kinds=[kind.__name__ for kind in kinds])
    messages = [decode(event.frame).message for event, _ in events]
    return [message for message in messages if isinstance(message, kinds)]


def read_token_versions(folder: RunFolder) -> dict[int, set[int]]:
    """Return the token versions of trajectories, by the version of the last step request before their end."""
    version, by_version = -1, dict[int, set[int]]()
    for message in read_messages(folder, "head", StepRequested, TrajectoryFinished):
        if isinstance(message, StepRequested):
            version = message.version
        elif version >= 0:
            generated = np.frombuffer(message.record.loss_mask, np.uint8).astype(bool)
            token_versions = np.frombuffer(message.record.versions, np.int32)
            assert set(token_versions[~generated].tolist()) <= {-1}
            by_version.setdefault(version, set()).update(token_versions[generated].tolist())
    return by_version


def list_process_ids(folder: RunFolder, name: str) -> list[int]:
    """Return the process ids of all incarnations of a process."""
    return [entry["pid"] for entry in read_log_entries(folder, "process.started") if entry["name"] == name]
