"""Writes new weights into the slots in shared memory; the ranks of the leading rank's machine write a slot together.

A slot is overwritten under an exclusive lock of its file. If an engine still reads the slot, a new file replaces the
slot, and the engine keeps the old file. Overwriting is faster, because the file's pages are in memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.configs.atomic_write import raising_disk_errors
from asterism.engine.weight_transfer.chunk_digests import RunningDigests, write_digests
from asterism.engine.weight_transfer.file_lock import try_lock, unlock
from asterism.engine.weight_transfer.page_locks import LockedPages, PageLocker
from asterism.engine.weight_transfer.slot_file import (
    HEADER,
    UNFINISHED_VERSION,
    SlotHeader,
    build_header,
    compute_file_bytes,
    count_digest_chunks,
    digest_table,
    get_body_offset,
    get_chunk_table,
    get_slot_path,
)
from asterism.engine.weight_transfer.weight_layout import WeightLayout, view_body

_NO_DIGEST = "00" * 16


class SlotWriter:
    """Gives one rank access to slot `first_slot + version % num_slots`.

    Earlier versions stay readable while engines load them. The leading rank prepares a slot; then all ranks of its
    machine write and digest their parts; then the leading rank seals the slot.
    `folder` is in shared memory and belongs to the run (RunFolder.shared_memory); the launcher removes it.
    """

    def __init__(
        self,
        folder: Path,
        layout: WeightLayout,
        num_slots: int,
        first_slot: int = 0,
        locker: PageLocker | None = None,
        threads: int = 1,
    ) -> None:
        """`locker`: locks the pages of each slot once, for copies from a GPU. `threads`: number of digest threads."""
        self._folder, self._threads = folder, threads
        self._locker = locker
        self._first_slot = first_slot
        self._layout = layout
        self._slots: list[_MappedSlot | None] = [None] * num_slots

    def prepare(self, version: int, prefix: bytes = b"") -> None:
        """Invalidate the slot, allocate its memory and write the prefix. Raises DiskError if the memory is full."""
        path = self._get_path(version)
        with raising_disk_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            slot = self._lock_present(version) or _create_slot(
                path, compute_file_bytes(self._layout.num_bytes), self._locker
            )
        slot.write_header(SlotHeader(UNFINISHED_VERSION, self._layout.num_bytes, _NO_DIGEST))
        start = get_body_offset(self._layout.num_bytes)
        slot.content[start : start + len(prefix)] = prefix
        self._slots[version % len(self._slots)] = slot

    def open(self, version: int) -> dict[str, Tensor]:
        """Return views of the parameters in the prepared slot, to be written."""
        return self._layout.view(view_body(self._open_slot(version).content, self._layout.num_bytes))

    def digest(self, version: int, part: int, num_parts: int) -> None:
        """Write every `num_parts`-th digest of the chunk table, from `part` on, after all ranks have written."""
        content, num_bytes = memoryview(self._open_slot(version).content), self._layout.num_bytes
        numbers = range(part, count_digest_chunks(num_bytes), num_parts)
        write_digests(content, num_bytes, numbers, self._threads)

    def start_digests(self, version: int) -> RunningDigests:
        """Start digests of a rank that writes the whole slot, in the order of the layout."""
        return RunningDigests(memoryview(self._open_slot(version).content), self._layout.num_bytes, self._threads)

    def seal(self, version: int) -> WeightsPublished:
        """Make the slot valid, after all ranks have written their digests; return the message for the engines."""
        slot, num_bytes = self._open_slot(version), self._layout.num_bytes
        digest = digest_table(get_chunk_table(memoryview(slot.content), num_bytes), num_bytes)
        published = WeightsPublished(version, str(self._get_path(version)), num_bytes, digest)
        slot.write_header(build_header(published))
        slot.unlock()
        return published

    def close(self) -> None:
        """Remove the files. Processes with an open file keep its contents."""
        for number in range(len(self._slots)):
            self._slots[number] = None
            get_slot_path(self._folder, self._first_slot + number).unlink(missing_ok=True)

    def _open_slot(self, version: int) -> _MappedSlot:
        number, path = version % len(self._slots), self._get_path(version)
        slot = self._slots[number]
        if slot is None or not slot.is_at(path):
            slot = self._slots[number] = _MappedSlot(path, self._locker)
        return slot

    def _lock_present(self, version: int) -> _MappedSlot | None:
        """Return the locked slot; None if there is no such file, an engine reads it, or it has another size.

        A killed learner can leave an empty file.
        """
        path = self._get_path(version)
        if not path.exists():
            return None
        if path.stat().st_size == compute_file_bytes(self._layout.num_bytes):
            slot = self._open_slot(version)
            if slot.try_lock():
                return slot
        path.unlink()
        return None

    def _get_path(self, version: int) -> Path:
        return get_slot_path(self._folder, self._first_slot + version % len(self._slots))


class _MappedSlot:
    """A mapped file. Its lock ends when the object is deleted or the process exits."""

    def __init__(self, path: Path, locker: PageLocker | None) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self.content = mmap.mmap(self._file, 0)
        self._pages = LockedPages(self.content, locker)

    def is_at(self, path: Path) -> bool:
        """Return whether the path still names this file."""
        return path.exists() and os.path.samestat(path.stat(), os.fstat(self._file))

    def try_lock(self) -> bool:
        return try_lock(self._file)

    def unlock(self) -> None:
        unlock(self._file)

    def write_header(self, header: SlotHeader) -> None:
        self.content[: HEADER.size] = header.pack()


def _create_slot(path: Path, size: int, locker: PageLocker | None) -> _MappedSlot:
    with path.open("xb") as file:
        # If the memory is full, posix_fallocate raises an error; without it, a later write would end in a SIGBUS.
        os.posix_fallocate(file.fileno(), 0, size)
    slot = _MappedSlot(path, locker)
    assert slot.try_lock(), f"{path} is new, but locked"
    return slot
