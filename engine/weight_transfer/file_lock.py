"""Locks files and folders that several processes share. The kernel releases the locks of a dead process."""

import fcntl
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

LOCK_POLL_S = 0.05  # the lock is polled, because a blocking flock cannot be cancelled


def wait_for_lock(file: int, stop: threading.Event) -> bool:
    """Lock the open file exclusively, until it is closed; False if `stop` was set before."""
    while not stop.is_set():
        if try_lock(file):
            return True
        stop.wait(LOCK_POLL_S)
    return False


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Lock the open file; False if another open file has a lock that excludes this one."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on the file or folder."""
    with opened(path) as file:
        return not try_lock(file)


@contextmanager
def opened(path: Path) -> Generator[int]:
    """Yield the descriptor of the file or folder, for reading; no child process inherits it."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
