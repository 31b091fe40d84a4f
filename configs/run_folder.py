"""Where a run keeps what: every path below `runs/NAME/` is named here and nowhere else."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import NamedTuple


class RunFolder(NamedTuple):
    path: Path
    scratch: str = ""  # of a node that has joined: whose sockets and memory these are, among the nodes of one machine

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
        """Structured logs: one `PROCESS.jsonl` and, for what it printed, one `PROCESS.out` each."""
        return self.path / "logs"

    @property
    def events(self) -> Path:
        """Event logs: one `PROCESS.sqlite` each."""
        return self.path / "events"

    @property
    def metrics(self) -> Path:
        """One JSON line for each step and each evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def utilization(self) -> Path:
        """Where the run's time went, in one object; its picture beside it."""
        return self.path / "utilization.json"

    @property
    def utilization_picture(self) -> Path:
        return self.path / "utilization.png"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def boots(self) -> Path:
        """How often the run was launched."""
        return self.path / "boots"

    @property
    def nodes(self) -> Path:
        """How many nodes have joined, over all launches."""
        return self.path / "nodes"

    @property
    def batches(self) -> Path:
        """What the learner was given since its last checkpoint."""
        return self.path / "batches"

    @property
    def sockets(self) -> Path:
        """The ipc sockets. Outside the run's folder, since the path of a socket is limited to 107 bytes."""
        return Path(tempfile.gettempdir()) / self._scratch_name

    @property
    def shared_memory(self) -> Path:
        """Where weights are handed over: memory where the system has it, else the disk."""
        memory = Path("/dev/shm")
        return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"{self._scratch_name}-weights"

    @property
    def _scratch_name(self) -> str:
        owner = self.scratch or str(self.path.resolve())
        digest = hashlib.blake2b(owner.encode(), digest_size=6).hexdigest()
        return f"asterism-{os.getuid()}-{digest}"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` RL steps; step 0 is the end of the cold start."""
        return self.checkpoints / f"step_{step:06d}"

    def expand(self, path: str) -> Path:
        """A path from the configuration, `$RUN` replaced by this folder."""
        return Path(path.replace("$RUN", str(self.path)))
