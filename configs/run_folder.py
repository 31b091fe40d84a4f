"""Paths of a run's files: the only place that names paths below `runs/NAME/`."""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from asterism.configs.errors import UnusableInput


class RunFolder(NamedTuple):
    path: Path
    # Of a joined node: keeps its sockets and shared memory apart from those of other nodes of this machine.
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
        """Per process, its structured log `PROCESS.jsonl` and its output `PROCESS.out`."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """One event log `PROCESS.sqlite` per process."""
        return self.path / "events"

    @property
    def problem_counts(self) -> Path:
        """Numbers of training and test problems, for replays."""
        return self.path / "problems.json"

    @property
    def data_digests(self) -> Path:
        """Digests of the data files with which the run began."""
        return self.path / "data.json"

    @property
    def task_descriptions(self) -> Path:
        """Tools of the run's tasks with an import path, so that a replay does not import them."""
        return self.path / "tasks.json"

    @property
    def metrics(self) -> Path:
        """One JSON line per step of the cold start and of RL, and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def sinks(self) -> Path:
        """What each metric sink has delivered, and the identity of the run in the backends."""
        return self.path / "sinks"

    @property
    def answers(self) -> Path:
        """One JSON line per ended answer of an evaluation."""
        return self.path / "answers.jsonl"

    @property
    def provenance(self) -> Path:
        """Digests of the weights and questions of `asterism eval`."""
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
        """The checkpoint within the cold start."""
        return self.checkpoints / "sft_partial"

    @property
    def dialogue_tokens(self) -> Path:
        """Token files of the cold start, one folder for each file of dialogues (asterism.engine.data.token_files)."""
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
        """Number of launches of the run."""
        return self.path / "boots"

    @property
    def node_counter(self) -> Path:
        """Number of nodes that have joined, in all launches."""
        return self.path / "nodes"

    def get_isolation_path(self, executor: str) -> Path:
        """The isolation that the sandbox backend `auto` chose for an executor of the present launch."""
        return self.path / "isolation" / f"{executor}.json"

    @property
    def batches(self) -> Path:
        """Batches that the learner received since its last checkpoint."""
        return self.path / "batches"

    @property
    def sockets(self) -> Path:
        """Outside the run's folder: the path of an ipc socket is limited to 107 bytes."""
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
        return f"asterism-{os.getuid()}-{digest}"  # as asterism.bus.process.scratch_lock names them

    def get_checkpoint_path(self, step: int) -> Path:
        """The checkpoint after `step` RL steps; step 0 is the end of the cold start."""
        return self.checkpoints / f"step_{step:06d}"

    def get_export_path(self, step: int) -> Path:
        """The export of a step that `asterism serve` has written."""
        return self.path / "exports" / f"step_{step:06d}"

    def expand_path(self, path: str) -> Path:
        """A path from the configuration, with `$RUN` replaced by this folder."""
        return Path(path.replace("$RUN", str(self.path)))


class StagesFolder(NamedTuple):
    """The folder of a run with [[stages]], which has a run folder for each of them."""

    path: Path

    @property
    def record(self) -> Path:
        """The names of the stages, in order: {"stages": [...]}."""
        return self.path / "stages.json"

    @property
    def curves(self) -> Path:
        return self.path / "stages.png"

    def get_stage(self, number: int, name: str) -> RunFolder:
        """`number`: from 1."""
        return RunFolder(self.path / f"{number}_{name}")

    def list_begun(self) -> list[RunFolder]:
        """The stages that have a configuration, in order. Raises OSError and msgspec.MsgspecError without a record."""
        names = msgspec.json.decode(self.record.read_bytes(), type=dict[str, list[str]])["stages"]
        folders = [self.get_stage(number, name) for number, name in enumerate(names, 1)]
        return [folder for folder in folders if folder.config.exists()]

    def refuse(self) -> None:
        """For commands that need one stage. Raises UnusableInput, which lists them, if the folder has stages."""
        if self.record.exists():
            begun = ", ".join(str(stage.path) for stage in self.list_begun())
            raise UnusableInput(f"{self.path}: has several stages; name one of them: {begun or 'none has begun'}")
