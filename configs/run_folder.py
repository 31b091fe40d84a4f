"""Names the paths of a run's files. No other module names paths below `runs/NAME/`."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from asterism.configs.errors import UnusableInput


class RunPath:
    """A file or folder below the `path` of a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder | StagesFolder", owner: type) -> Path:
        return folder.path / self._name


class RunFolder(NamedTuple):
    path: Path
    # Name of a joined node: separates its sockets and shared memory from those of other nodes of this machine.
    scratch: str = ""

    config = RunPath("config.toml")
    data = RunPath("data")
    checkpoints = RunPath("checkpoints")
    partial_cold_start = RunPath("checkpoints/sft_partial")  # checkpoint within the cold start
    batches = RunPath("batches")  # batches that the learner received since its last checkpoint
    dialogue_tokens = RunPath("dialogue_tokens")  # a folder per file of dialogues (asterism.engine.data.token_files)
    logs = RunPath("logs")  # per process, its structured log `PROCESS.jsonl` and its output `PROCESS.out`
    events = RunPath("events")  # event logs: `PROCESS.sqlite` for each process
    problem_counts = RunPath("problems.json")  # numbers of training and test problems, for replays
    data_digests = RunPath("data.json")  # digests of the data files with which the run began
    task_descriptions = RunPath("tasks.json")  # tools of tasks with an import path: a replay does not import them
    metrics = RunPath("metrics.jsonl")  # one line per step of the cold start and of RL, and per evaluation
    sinks = RunPath("sinks")  # deliveries of each metric sink, and the identity of the run in the backends
    answers = RunPath("answers.jsonl")  # one line per ended answer of an evaluation
    provenance = RunPath("provenance.json")  # digests of the weights and questions of `asterism eval`
    results = RunPath("results.json")  # results of `asterism eval`
    summary = RunPath("summary.json")
    curves = RunPath("curves.png")
    cold_start = RunPath("cold_start.png")  # curves of the cold start
    utilization = RunPath("utilization.json")  # time report of the run
    utilization_plot = RunPath("utilization.png")
    lock = RunPath("lock")
    launch_counter = RunPath("boots")  # number of launches of the run
    node_counter = RunPath("nodes")  # number of nodes that have joined, in all launches

    def get_isolation_path(self, executor: str) -> Path:
        """Return the file with the isolation that the sandbox backend `auto` chose for an executor in this launch."""
        return self.path / "isolation" / f"{executor}.json"

    @property
    def sockets(self) -> Path:
        """The folder of sockets, outside the run's folder: the path of an ipc socket is limited to 107 bytes."""
        return Path(tempfile.gettempdir()) / self._scratch_name

    @property
    def shared_memory(self) -> Path:
        """The folder for published weights: in /dev/shm if it exists, else on disk."""
        memory = Path("/dev/shm")
        return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"{self._scratch_name}-weights"

    @property
    def _scratch_name(self) -> str:
        owner = self.scratch or str(self.path.resolve())
        digest = hashlib.blake2b(owner.encode(), digest_size=6).hexdigest()
        return f"asterism-{os.getuid()}-{digest}"  # name as in asterism.bus.process.scratch_lock

    def get_checkpoint_path(self, step: int) -> Path:
        """Return the checkpoint after `step` RL steps; step 0 is the end of the cold start."""
        return self.checkpoints / f"step_{step:06d}"

    def get_export_path(self, step: int) -> Path:
        """Return the export of a step that `asterism serve` has written."""
        return self.path / "exports" / f"step_{step:06d}"

    def expand_path(self, path: str) -> Path:
        """Return a path from the configuration, with `$RUN` replaced by this folder."""
        return Path(path.replace("$RUN", str(self.path)))


class StagesFolder(NamedTuple):
    """The folder of a run with [[stages]], which has a run folder for each of them."""

    path: Path

    record = RunPath("stages.json")  # names of the stages, in order: {"stages": [...]}
    curves = RunPath("stages.png")

    def get_stage(self, number: int, name: str) -> RunFolder:
        """Return the run folder of a stage. `number`: counts from 1."""
        return RunFolder(self.path / f"{number}_{name}")

    def list_begun(self) -> list[RunFolder]:
        """Return the stages that have a configuration, in order. Without a record: OSError or msgspec.MsgspecError."""
        names = msgspec.json.decode(self.record.read_bytes(), type=dict[str, list[str]])["stages"]
        folders = [self.get_stage(number, name) for number, name in enumerate(names, 1)]
        return [folder for folder in folders if folder.config.exists()]

    def refuse(self) -> None:
        """Raise UnusableInput with the stages of the folder, for commands that need one stage."""
        if self.record.exists():
            begun = ", ".join(str(stage.path) for stage in self.list_begun())
            raise UnusableInput(f"{self.path}: has several stages; name one of them: {begun or 'none has begun'}")
