"""The batches that the learner has received since its last checkpoint, and the samples of their groups.

metrics_000011.msgpack         metrics of a step with a checkpoint, kept until the next checkpoint
step_000012/
    group_00000345_0.samples   a part of an accepted group (asterism.engine.learner.batches.sample_files)
    batch.msgpack              the frame of BatchReady: the batch is complete

A message is acknowledged after it is written. A killed learner restarts from its checkpoint and repeats its steps from
the journal, without a request to another process.
"""

import re
import shutil
import threading
from pathlib import Path

import msgspec

from asterism.bus.codec import decode
from asterism.bus.messages import BatchReady, GroupAccepted
from asterism.configs.atomic_write import raising_disk_errors, write_atomically
from asterism.engine.learner.batches.sample_files import SampleIndex, read_index, write_samples
from asterism.policies.groups.staleness import check_versions

_FOLDER_NAME = re.compile(r"step_(\d{6,})")
_BATCH_NAME = "batch.msgpack"
_METRICS_NAME = re.compile(r"metrics_(\d{6,})\.msgpack")


class BatchJournal:
    def __init__(self, folder: Path, max_staleness: int = 0) -> None:
        self._folder = folder
        self._max_staleness = max_staleness
        self._lock = threading.Lock()  # a duplicate of a group can arrive while its step is deleted
        folder.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.mkdir()

    def write_group(self, group: GroupAccepted) -> None:
        """Write the samples of a part of a group, in place of the file of an earlier incarnation.

        Raises DiskError, ProtocolError for tokens of versions that the step must not train on, and ValueError for an
        invalid sample.
        """
        check_versions(group.samples, group.step, self._max_staleness)
        with self._lock:
            write_samples(self._make_step_folder(group.step) / _name_part(group.group_id, group.part), group)

    def write(self, step: int, frame: bytes) -> None:
        """Write the received frame of a step's batch, after its groups. Raises DiskError."""
        with self._lock:
            write_atomically(self._make_step_folder(step) / _BATCH_NAME, frame)

    def list_steps(self) -> list[int]:
        """Return the steps with a complete batch, in ascending order."""
        return [step for step, folder in self._list_steps(_FOLDER_NAME) if (folder / _BATCH_NAME).exists()]

    def read(self, step: int) -> BatchReady:
        batch = decode((self._get_step_folder(step) / _BATCH_NAME).read_bytes()).message
        assert isinstance(batch, BatchReady)
        return batch

    def read_indexes(self, batch: BatchReady) -> list[SampleIndex]:
        """Read the sample indexes in the order of the batch. Raises OSError for a missing file."""
        folder = self._get_step_folder(batch.step)
        names = [_name_part(group.group_id, part) for group in batch.groups for part in range(group.num_parts)]
        return [read_index(folder / name) for name in names]

    def write_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step before its checkpoint: a learner killed later does not repeat the step.

        Raises DiskError.
        """
        write_atomically(self._get_metrics_path(step), msgspec.msgpack.encode(metrics))

    def read_metrics(self, step: int) -> dict[str, float]:
        """Read the metrics of a step; empty if this launch of the run has not trained the step."""
        path = self._get_metrics_path(step)
        return msgspec.msgpack.decode(path.read_bytes(), type=dict[str, float]) if path.exists() else {}

    def delete_up_to(self, step: int) -> None:
        """Delete the batches of steps up to `step`, which has a checkpoint. The metrics of `step` remain."""
        with self._lock:
            for each, folder in self._list_steps(_FOLDER_NAME):
                if each <= step:
                    shutil.rmtree(folder)
            for each, path in self._list_steps(_METRICS_NAME):
                if each < step:
                    path.unlink()

    def _list_steps(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        names = ((pattern.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(name[1]), path) for name, path in names if name)

    def _get_metrics_path(self, step: int) -> Path:
        return self._folder / f"metrics_{step:06d}.msgpack"

    def _get_step_folder(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"

    def _make_step_folder(self, step: int) -> Path:
        folder = self._get_step_folder(step)
        with raising_disk_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder


def _name_part(group_id: int, part: int) -> str:
    return f"group_{group_id:08d}_{part}.samples"
