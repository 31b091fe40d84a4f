"""A session's processes as the fork server sees them in its /proc: all that descend from the base. Standard library only.

`proc` is a descriptor of /proc. The processes come and go while they are looked at, and may try to outrun it.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH208

import os
import signal
import time

from sandbox.inside.calls import Started

_ROUNDS = 16  # of looking for processes that have been started meanwhile
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # by which the kernel tells when a process was started


def descendants(proc: int, pid: int) -> list[int]:
    found: list[int] = []
    parents = [pid]
    while parents:
        parents = [child for parent in parents for child in _children(proc, parent)]
        found += parents
    return found


def find(proc: int, base: int, own_id: int) -> int | None:
    """The descendant that calls itself `own_id`."""
    return next((pid for pid in descendants(proc, base) if _own_id(proc, pid) == own_id), None)


def end_cell(proc: int, base: int, started: Started) -> bool:
    """Ends the worker, and what has been started since the checkpoint. False if new ones come as fast as they end."""
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() + started.checkpoint_at - _TICK_S
    judged: set[int] = set()
    quiet = 0
    for _ in range(_ROUNDS):
        new = set(descendants(proc, base)) - judged
        for pid in new:
            if not started.checkpoint or _is_of_cell(proc, pid, started, since_s):
                _kill(pid)
        judged |= new
        quiet = 0 if new else quiet + 1
        if quiet == 2:  # one that moved from a parent to the base may be overlooked once
            return True
    return False


def _is_of_cell(proc: int, pid: int, started: Started, since_s: float) -> bool:
    own_id = _own_id(proc, pid)
    if own_id in (started.checkpoint, started.worker):
        return own_id == started.worker
    stat = _read(proc, f"{pid}/stat")
    return bool(stat) and int(stat.rpartition(b")")[2].split()[19]) * _TICK_S >= since_s


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _own_id(proc: int, pid: int) -> int | None:
    """Its process id in its own pid namespace."""
    for line in _read(proc, f"{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return None


def _children(proc: int, pid: int) -> list[int]:
    try:
        tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    except OSError:
        return []
    try:
        return [int(child) for task in os.listdir(tasks) for child in _read(tasks, f"{task}/children").split()]
    except OSError:
        return []
    finally:
        os.close(tasks)


def _read(folder: int, path: str) -> bytes:
    """Nothing of a process that has ended."""
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return b""
    try:
        chunks = list(iter(lambda: os.read(fd, 65_536), b""))
    except OSError:
        return b""
    finally:
        os.close(fd)
    return b"".join(chunks)
