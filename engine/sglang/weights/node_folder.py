"""Writes folders of weights that all servers of a node read.

Each version has one folder, which is written once and removed after its last read.

    lock            locked exclusively while a process writes or removes a folder, but not while servers read
    part            a folder that is being written or removed; if the lock is free, a killed process has left it
    KEY             a complete folder; an engine holds a shared lock of it while its server reads

A rename gives a complete folder its name. The kernel releases the locks of a killed process. The next process removes
the folder of a killed process, or reads it if it is complete.
"""

import os
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import structlog

from asterism.engine.weight_transfer.file_lock import LOCK_POLL_S, is_locked, try_lock, wait_for_lock
from asterism.engine.weight_transfer.published_bytes import MAX_FOLDERS

_LOCK, _PART = "lock", "part"

Write = Callable[[Path], None]


class NodeFolders:
    def __init__(self, root: Path) -> None:
        """`root`: the run's folder on this node; should be in memory. All engines of the node share it."""
        self._root = root
        self._held: int | None = None  # open folder that this engine's server can read

    def acquire(self, key: str, write: Write, stop: threading.Event) -> Path | None:
        """Return the complete folder `key`, which stays until `release`. Blocks; returns None after `stop`.

        `write`: fills an empty folder; one process of the node runs it while the others wait. Raises its errors, and
        OSError if the memory is full.
        """
        self.release()  # an update that was cancelled twice can have left a folder
        folder = self._root / key
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        while not stop.is_set():
            with self._locked(stop) as has_lock:
                if has_lock and self._remove_unused(keep=key) < MAX_FOLDERS:
                    if not folder.exists():
                        self._write(folder, write)
                    self._hold(folder)
                    return folder
            stop.wait(LOCK_POLL_S)  # two other versions are being read
        return None

    def release(self) -> None:
        """Remove the folder if no other engine of the node reads it. Does nothing without a held folder."""
        if self._held is None:
            return
        os.close(self._held)
        self._held = None
        try:
            with self._locked(threading.Event()):
                self._remove_unused()
        except FileNotFoundError:
            return  # the launcher has removed all folders
        except OSError as error:  # the next acquire removes the rest
            structlog.get_logger().warning("weights.folder_not_removed", cause=str(error))

    def _hold(self, folder: Path) -> None:
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        is_shared = try_lock(self._held, shared=True)
        assert is_shared, f"{folder} is locked exclusively, although {self._root / _LOCK} is not"

    def _write(self, folder: Path, write: Write) -> None:
        part = self._root / _PART
        part.mkdir()
        try:
            write(part)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _remove_unused(self, keep: str = "") -> int:
        """Remove folders that no server reads, under the lock. Count the other folders, except `keep`."""
        part, num_read = self._root / _PART, 0
        shutil.rmtree(part, ignore_errors=True)
        for folder in self._root.iterdir():
            if folder.name in (_LOCK, keep):
                continue
            if is_locked(folder):
                num_read += 1
                continue
            folder.rename(part)  # if this process is killed during the removal, no incomplete folder has this name
            shutil.rmtree(part)
        return num_read

    @contextmanager
    def _locked(self, stop: threading.Event) -> Generator[bool]:
        with (self._root / _LOCK).open("ab") as file:
            yield wait_for_lock(file.fileno(), stop)
