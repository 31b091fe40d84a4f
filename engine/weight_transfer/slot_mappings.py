"""Maps slots for an engine and keeps the mappings that it can use again.

The learner overwrites a slot in place, so the mapping of its file stays valid, and a GPU's pages are locked once.
Another node writes a new file for each version. So a mapping is kept only if its file is mapped a second time.
"""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from asterism.engine.weight_transfer.page_locks import LockedPages, PageLocker

_MADV_POPULATE_READ = 22  # constant of Linux 5.14; Python has no name for it


class _FileId(NamedTuple):
    device: int
    inode: int


class _KeptMapping(NamedTuple):
    content: mmap.mmap
    pages: LockedPages


class SlotMappings:
    def __init__(self, locker: PageLocker | None = None, threads: int = 1) -> None:
        """`threads`: number of threads that verify a version."""
        self.threads = threads
        self._locker = locker
        self._seen: dict[Path, _FileId] = {}
        self._kept: dict[Path, _KeptMapping] = {}

    def map(self, path: Path, file: int) -> mmap.mmap:
        """Return the content of the open file. `path`: the name under which it was opened."""
        self._drop_replaced()
        status = os.fstat(file)
        file_id = _FileId(status.st_dev, status.st_ino)
        if self._seen.get(path) != file_id:
            self._seen[path] = file_id
            return map_privately(file)
        if path not in self._kept:
            content = _map_shared(file)
            self._kept[path] = _KeptMapping(content, LockedPages(content, self._locker))
        return self._kept[path].content

    def _drop_replaced(self) -> None:
        """Drop replaced files, because their mappings would keep the memory."""
        for path, file_id in list(self._seen.items()):
            if _identify(path) != file_id:
                del self._seen[path]
                self._kept.pop(path, None)


def map_privately(file: int) -> mmap.mmap:
    """Map the file privately as writable memory for torch, which does not write to it."""
    content = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    with suppress(OSError):
        content.madvise(_MADV_POPULATE_READ)  # one call is cheaper than a page fault per 64 KiB
    return content


def _map_shared(file: int) -> mmap.mmap:
    """Map the file shared: a GPU's driver would copy the pages of a private mapping when it locks them."""
    writable = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        content = mmap.mmap(writable, 0)
    finally:
        os.close(writable)
    with suppress(OSError):
        content.madvise(_MADV_POPULATE_READ)
    return content


def _identify(path: Path) -> _FileId | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return _FileId(status.st_dev, status.st_ino)
