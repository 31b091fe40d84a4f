"""The processes that a fork server has started, and what they have started, as its /proc shows them. Standard library only.

They come and go while they are looked at, and may try to outrun who looks. One that has ended has nothing to show.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH208

import os
import signal
import time

from sandbox.inside.calls import Started

_ROUNDS = 16  # of looking for processes that have been started meanwhile
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # by which the kernel tells when a process was started


class ProcessTree:
    """`proc` is a descriptor of /proc."""

    def __init__(self, proc: int) -> None:
        self._proc = proc

    def children(self, pid: int) -> list[int]:
        try:
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return []
        try:
            return [int(child) for task in os.listdir(tasks) for child in _read(tasks, f"{task}/children").split()]
        except OSError:
            return []
        finally:
            os.close(tasks)

    def descendants(self, pid: int) -> list[int]:
        found: list[int] = []
        parents = [pid]
        while parents:
            parents = [child for parent in parents for child in self.children(parent)]
            found += parents
        return found

    def find(self, base: int, own_id: int) -> int | None:
        """The descendant that calls itself `own_id`."""
        return next((pid for pid in self.descendants(base) if self._own_id(pid) == own_id), None)

    def read(self, pid: int, name: str) -> bytes:
        """A file of the process's folder."""
        return _read(self._proc, f"{pid}/{name}")

    def offer_to_the_kernel_first(self, pid: int) -> None:
        """When memory runs out, the kernel ends this process and its children before the fork server or the training."""
        try:
            fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY, dir_fd=self._proc)
        except OSError:
            return
        os.write(fd, b"1000")
        os.close(fd)

    def end_cell(self, base: int, started: Started) -> bool:
        """Ends the worker of a session, and what has been started since its checkpoint.

        False if new ones come as fast as they end.
        """
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() + started.checkpoint_at
        judged: set[int] = set()
        quiet = 0
        for _ in range(_ROUNDS):
            new = set(self.descendants(base)) - judged
            for pid in new:
                if not started.checkpoint or self._is_of_cell(pid, started, since_s):
                    _kill(pid)
            judged |= new
            quiet = 0 if new else quiet + 1
            if quiet == 2:  # one that moved from a parent to the base may be overlooked once
                return True
        return False

    def _is_of_cell(self, pid: int, started: Started, since_s: float) -> bool:
        own_id = self._own_id(pid)
        stat = _read(self._proc, f"{pid}/stat")
        if own_id is None or not stat:
            return False
        if own_id in (started.checkpoint, started.worker):
            return own_id == started.worker
        later_s = int(stat.rpartition(b")")[2].split()[19]) * _TICK_S - since_s
        # Process ids grow until they begin again, which takes longer than two ticks.
        return own_id > started.checkpoint if abs(later_s) < 2 * _TICK_S else later_s > 0

    def _own_id(self, pid: int) -> int | None:
        """Its process id in its own pid namespace."""
        for line in _read(self._proc, f"{pid}/status").splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(folder: int, path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(fd, 65_536), b""))
    except OSError:
        return b""
    finally:
        os.close(fd)
