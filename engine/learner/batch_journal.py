"""The batches that the learner has received since its last checkpoint, one file each.

A batch is acknowledged after it is written. A killed learner restarts from its checkpoint and repeats its steps from
the journal, without a request to another process.
"""

import re
import shutil
from pathlib import Path

from bus.codec import decode
from bus.messages import BatchReady
from configs.atomic_write import write_atomically

_FILE_NAME = re.compile(r"step_(\d{6,})\.batch")


class BatchJournal:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def write(self, step: int, frame: bytes) -> None:
        """The batch of a step, as it arrived. Raises DiskError."""
        write_atomically(self._folder / f"step_{step:06d}.batch", frame)

    def list_steps(self) -> list[int]:
        """In ascending order."""
        names = (_FILE_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def read(self, step: int) -> BatchReady:
        batch = decode((self._folder / f"step_{step:06d}.batch").read_bytes()).message
        assert isinstance(batch, BatchReady)
        return batch

    def delete_up_to(self, step: int) -> None:
        """Call this after a checkpoint of `step`."""
        for each in self.list_steps():
            if each <= step:
                (self._folder / f"step_{each:06d}.batch").unlink()
