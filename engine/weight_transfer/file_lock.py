"""Locks of files and folders that several processes share. The kernel releases the locks of a dead process."""

import fcntl
import os
import threading
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
    """False if another open file has a lock that excludes this one."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a process has a lock on the file or folder."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return not try_lock(file)
    finally:
        os.close(file)
