"""Names the paths of a run's files. No other module names paths below `runs/NAME/`."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from asterism.configs.errors import UnusableInput


class RunFolder(NamedTuple):
    path: Path
    # Name of a joined node: separates its sockets and shared memory from those of other nodes of this machine.
    scratch: str = ""

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """The folder of logs: per process, its structured log `PROCESS.jsonl` and its output `PROCESS.out`."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """The folder of event logs: `PROCESS.sqlite` for each process."""
        return self.path / "events"

    @property
    def problem_counts(self) -> Path:
        """The file with the numbers of training and test problems, for replays."""
        return self.path / "problems.json"

    @property
    def data_digests(self) -> Path:
        """The digests of the data files with which the run began."""
        return self.path / "data.json"

    @property
    def task_descriptions(self) -> Path:
        """The tools of the run's tasks with an import path, so that a replay does not import them."""
        return self.path / "tasks.json"

    @property
    def metrics(self) -> Path:
        """The metrics: one JSON line per step of the cold start and of RL, and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def sinks(self) -> Path:
        """The deliveries of each metric sink, and the identity of the run in the backends."""
        return self.path / "sinks"

    @property
    def answers(self) -> Path:
        """The answers: one JSON line per ended answer of an evaluation."""
        return self.path / "answers.jsonl"

    @property
    def provenance(self) -> Path:
        """The digests of the weights and questions of `asterism eval`."""
        return self.path / "provenance.json"

    @property
    def results(self) -> Path:
        """The results of `asterism eval`."""
        return self.path / "results.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def partial_cold_start(self) -> Path:
        """The newest checkpoint of an unfinished cold start."""
        return self.checkpoints / "sft_partial"

    @property
    def dialogue_tokens(self) -> Path:
        """The token files of the cold start, a folder for each file of dialogues (asterism.engine.data.token_files)."""
        return self.path / "dialogue_tokens"

    @property
    def cold_start(self) -> Path:
        """The curves of the cold start."""
        return self.path / "cold_start.png"

    @property
    def utilization(self) -> Path:
        """The time report of the run, a JSON object; its plot is `utilization_plot`."""
        return self.path / "utilization.json"

    @property
    def utilization_plot(self) -> Path:
        return self.path / "utilization.png"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def launch_counter(self) -> Path:
        """The number of launches of the run."""
        return self.path / "boots"

    @property
    def node_counter(self) -> Path:
        """The number of nodes that have joined, in all launches."""
        return self.path / "nodes"

    def get_isolation_path(self, executor: str) -> Path:
        """Return the file with the isolation that the sandbox backend `auto` chose for an executor in this launch."""
        return self.path / "isolation" / f"{executor}.json"

    @property
    def batches(self) -> Path:
        """The batches that the learner received since its last checkpoint."""
        return self.path / "batches"

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

    @property
    def record(self) -> Path:
        """The file with the names of the stages, in order: {"stages": [...]}."""
        return self.path / "stages.json"

    @property
    def curves(self) -> Path:
        return self.path / "stages.png"

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
