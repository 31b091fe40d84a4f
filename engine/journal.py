"""The batches that the learner has been given since its last checkpoint, a file each.

A batch is acknowledged once it is here. So a learner that is killed begins again from its checkpoint, makes the steps
that it had made again, and asks nobody for anything.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from bus.codec import decode
from bus.messages import BatchReady
from configs.disk import write_whole

_NAME = re.compile(r"step_(\d{6,})\.batch")


class BatchJournal:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def write(self, step: int, frame: bytes) -> None:
        """The batch of a step, as it arrived. Raises DiskRefused."""
        write_whole(self._folder / f"step_{step:06d}.batch", frame)

    def steps(self) -> list[int]:
        """In their order."""
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def read(self, step: int) -> BatchReady:
        batch = decode((self._folder / f"step_{step:06d}.batch").read_bytes()).message
        assert isinstance(batch, BatchReady)
        return batch

    def forget_up_to(self, step: int) -> None:
        """There is a checkpoint of that step."""
        for each in self.steps():
            if each <= step:
                (self._folder / f"step_{each:06d}.batch").unlink()
