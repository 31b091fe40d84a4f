"""Writes checkpoints in a background thread on each rank, while training continues.

The thread reads weights and moments from the memory that training uses, so that no rank needs memory for a copy. The
next optimizer update waits in `wait_until_read` for the end of this read; forward and backward passes do not change the
memory. Then each rank exports its own shards from the files in its node's page cache, without collectives. The thread
then waits for the disk and gives the folder its final name.

All ranks make the same calls. Their threads communicate through a separate process group.
"""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from asterism.configs.atomic_write import sync_paths
from asterism.configs.file_manifest import digest_files, list_files, write_manifest
from asterism.engine.export.chat_files import ServedChat, write_chat_files
from asterism.engine.export.hf_export import (
    MAX_SHARD_BYTES,
    Shapes,
    make_readable,
    plan_shards,
    write_index,
    write_model_description,
    write_shard,
)
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.checkpoints.adapter_export import SavedAdapters, read_merged_weights, write_adapters
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    FIRST_CHECKPOINT,
    TrainerState,
    commit_checkpoint,
    get_partial_path,
    get_tensors_folder,
    naming_disk_errors,
    write_trainer_state,
)
from asterism.engine.learner.checkpoints.training_state import StateDict, read_whole_weights, write_training_state
from asterism.engine.learner.distributed import RankGroup

Result = TypeVar("Result")


class ModelExport(NamedTuple):
    """The options of a checkpoint's transformers model."""

    config: DecoderConfig
    shapes: Shapes  # weights without duplicates of tied weights and without adapters
    tokenizer_folder: Path
    dtype: torch.dtype
    adapters: SavedAdapters | None  # adapters to merge into the weights
    has_weights: bool = True  # False: only the configuration and the tokenizer
    max_shard_bytes: int = MAX_SHARD_BYTES
    build_chat: Callable[[], ServedChat | None] = lambda: None  # None: keeps the files of `tokenizer_folder`


class PendingCheckpoint(NamedTuple):
    checkpoint: Path
    trainer_state: TrainerState
    export: ModelExport
    on_committed: Callable[[], None]  # called on the leading rank after the folder has its final name


class CheckpointWriter:
    """A writer of one checkpoint at a time."""

    def __init__(self, ranks: RankGroup, threads: int) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(1, "checkpoint", self._start_thread, (threads,))
        self._committed: Future[None] | None = None
        self._is_read = threading.Event()
        self._is_read.set()

    def start(self, pending: PendingCheckpoint, state: StateDict) -> None:
        """Wait for the previous checkpoint, raise its error, and start. `state` must not change until it is read."""
        self.wait()
        self._is_read.clear()
        self._committed = self._thread.submit(self._write, pending, state)

    def wait_until_read(self, *_: object) -> None:
        """Wait until the state is read; optimizers call this hook. The leading rank raises errors of a failed write."""
        if not self._is_read.is_set():
            with self._ranks.operation("wait for the checkpoint"):
                self._is_read.wait()
        if self._ranks.is_leader and self._committed is not None and self._committed.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint has its final name on every rank. Raises DiskError and other errors of writes."""
        committed, self._committed = self._committed, None
        if committed is not None:
            with self._ranks.operation("wait for the checkpoint"):
                committed.result()

    # ---------------------------------------------------------------- in the background thread

    def _start_thread(self, threads: int) -> None:
        self._ranks.select_device()
        torch.set_num_threads(threads)

    def _write(self, pending: PendingCheckpoint, state: StateDict) -> None:
        try:
            name = f"save of step {pending.trainer_state.step}"
            with (
                self._ranks.operation(name, is_limited=False),
                naming_disk_errors(get_partial_path(pending.checkpoint)),
            ):
                self._write_folder(pending, state)
        finally:
            self._is_read.set()

    def _write_folder(self, pending: PendingCheckpoint, state: StateDict) -> None:
        target, ranks = get_partial_path(pending.checkpoint), self._ranks
        self._on_leader(partial(_make_empty, target))
        write_training_state(get_tensors_folder(target), state, ranks, self._is_read.set)
        state.clear()
        base = target.with_name(FIRST_CHECKPOINT) if pending.trainer_state.step else target
        digests: dict[str, str] = {}
        for of_rank in self._on_all_ranks(lambda: self._write_share(target, base, pending.export)):
            digests |= of_rank
        self._on_leader(partial(_commit, pending, digests))

    def _write_share(self, target: Path, base: Path, export: ModelExport) -> Mapping[str, str]:
        """Write this rank's files to the disk; return the digests of all files of this rank."""
        written = self._write_export(target, base, export)
        digests = digest_files(target, written)  # while the files are in the page cache
        sync_paths(written)
        return digests

    def _write_export(self, target: Path, base: Path, export: ModelExport) -> Sequence[Path]:
        """Write the shards of this rank; on the leading rank also the small files. Return all files of this rank.

        `base`: the checkpoint with the frozen weights of a model with adapters.
        """
        written = list(get_tensors_folder(target).glob(f"__{self._ranks.rank}_*"))
        shards = plan_shards(export.shapes, export.dtype, export.max_shard_bytes) if export.has_weights else []
        if self._ranks.is_leader:
            write_model_description(target, export.config, export.tokenizer_folder, export.dtype)
            if (chat := export.build_chat()) is not None:
                write_chat_files(target, chat)
            write_index(target, shards, export.shapes, export.dtype)
            if export.adapters is not None and export.has_weights:
                written += write_adapters(target, export.adapters)
        read = partial(_read_weights, target, base, export)
        for shard in shards[self._ranks.rank :: self._ranks.world_size]:
            write_shard(target, shard, export.shapes, export.dtype, read)
            written.append(target / shard.file_name)
        return written

    def _on_leader(self, work: Callable[[], None]) -> None:
        self._on_all_ranks(work if self._ranks.is_leader else lambda: None)

    def _on_all_ranks(self, work: Callable[[], Result]) -> list[Result]:
        """Run `work` on all ranks; return the results by rank. If it fails on one rank, every rank raises an error."""
        if (group := self._ranks.checkpoint_group) is None:
            return [work()]
        error: BaseException | None = None
        outcome: tuple[str | None, Result | None] = None, None
        try:
            outcome = None, work()
        except BaseException as raised:
            error, outcome = raised, (f"{type(raised).__name__}: {raised}", None)
        outcomes: list[Any] = [None] * self._ranks.world_size
        dist.all_gather_object(outcomes, outcome, group)
        if error is not None:
            raise error
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise RuntimeError(f"checkpoint of rank {rank}: {text}")
        return [result for _, result in outcomes]


def _read_weights(target: Path, base: Path, export: ModelExport, names: Sequence[str]) -> dict[str, Tensor]:
    shapes = {name: export.shapes[name] for name in names}
    if export.adapters is None:
        return read_whole_weights(get_tensors_folder(target), shapes)
    return read_merged_weights(target, base, export.adapters, shapes)


def _make_empty(target: Path) -> None:
    """Make an empty folder, without the files of a killed save."""
    if target.exists():
        shutil.rmtree(target)
    get_tensors_folder(target).mkdir(parents=True)


def _commit(pending: PendingCheckpoint, digests: Mapping[str, str]) -> None:
    target = get_partial_path(pending.checkpoint)
    make_readable(target, (path for path in target.iterdir() if path.is_file()))
    write_trainer_state(target, pending.trainer_state)
    write_manifest(target, list_files(target), digests)
    commit_checkpoint(pending.checkpoint)
    pending.on_committed()
