"""Where a run keeps what: every path below `runs/NAME/` is named here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class RunFolder(NamedTuple):
    path: Path

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
    def lock(self) -> Path:
        return self.path / "lock"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` RL steps; step 0 is the end of the cold start."""
        return self.checkpoints / f"step_{step:06d}"

    def expand(self, path: str) -> Path:
        """A path from the configuration, `$RUN` replaced by this folder."""
        return Path(path.replace("$RUN", str(self.path)))
