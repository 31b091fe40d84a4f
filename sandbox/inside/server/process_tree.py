"""Finds and kills the descendants of a fork server through its /proc.

Processes start and end during a scan, and may try to outrun it. The results for an ended process
are empty.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH208

import contextlib
import os
import signal
import time
from collections.abc import Iterable

from asterism.sandbox.inside.wire.call_wire import CallStarted

_MAX_SCANS = 16  # scans of descendants, to find processes that started during the previous scan
_UNLIMITED = 1 << 30
TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # unit of a process's start time


class ProcessTree:
    """The processes below /proc, of which `proc_fd` is a descriptor."""

    def __init__(self, proc_fd: int) -> None:
        self._proc_fd = proc_fd

    def list_children(self, pid: int) -> list[int]:
        """Return the children of all threads, or nothing if the process has ended."""
        try:
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc_fd)
        except OSError:
            return []
        try:
            return [int(child) for task in os.listdir(tasks) for child in _read(tasks, f"{task}/children").split()]
        except OSError:
            return []
        finally:
            os.close(tasks)

    def list_threads(self, pid: int) -> list[int]:
        """Return the threads, or nothing if the process has ended."""
        try:
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc_fd)
        except OSError:
            return []
        try:
            return list(map(int, os.listdir(tasks)))
        except OSError:
            return []
        finally:
            os.close(tasks)

    def list_with_descendants(self, pids: Iterable[int]) -> list[int]:
        """Return the processes, in order, then their descendants."""
        found, parents = list(pids), list(pids)
        while parents:
            parents = [child for parent in parents for child in self.list_children(parent)]
            found += parents
        return found

    def list_descendants(self, pid: int) -> list[int]:
        return self.list_with_descendants([pid])[1:]

    def find_descendant(self, base: int, namespace_pid: int) -> int | None:
        """Return the descendant with this pid in its own pid namespace."""
        return next(
            (pid for pid in self.list_descendants(base) if self._read_namespace_pid(pid) == namespace_pid), None
        )

    def read_file(self, pid: int, name: str, max_bytes: int = _UNLIMITED) -> bytes:
        """Return a file of the process's /proc folder, or at least its first `max_bytes`."""
        return _read(self._proc_fd, f"{pid}/{name}", max_bytes)

    def read_machine_file(self, name: str) -> bytes:
        return _read(self._proc_fd, name)

    def list_descriptors(self, pid: int) -> dict[str, str]:
        """Return the target of each descriptor, such as a path or "socket:[number]"."""
        try:
            fds = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc_fd)
        except OSError:
            return {}
        targets: dict[str, str] = {}
        try:
            for fd in os.listdir(fds):
                with contextlib.suppress(OSError):  # closed in the meantime
                    targets[fd] = os.readlink(fd, dir_fd=fds)
        except OSError:  # ended in the meantime
            return {}
        finally:
            os.close(fds)
        return targets

    def measure_folder(self, pid: int, path: str) -> int:
        """Return the bytes in use of the file system at `path` of the process's root, or 0 without such a folder."""
        try:
            fd = os.open(f"{pid}/root{path}", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc_fd)
        except OSError:
            return 0
        try:
            usage = os.fstatvfs(fd)
            return (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        finally:
            os.close(fd)

    def prefer_for_oom_kill(self, pid: int) -> None:
        """Make the kernel kill the process and its children before the fork server or the training."""
        try:
            fd = os.open(f"{pid}/oom_score_adj", os.O_WRONLY, dir_fd=self._proc_fd)
        except OSError:
            return
        with contextlib.suppress(OSError):  # ended in the meantime
            os.write(fd, b"1000")
        os.close(fd)

    def kill_cell(self, base: int, started: CallStarted) -> bool:
        """Kill a notebook's worker and the processes started since its checkpoint.

        Return False if new processes start as fast as they are killed.
        """
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() + started.checkpoint_at
        judged: set[int] = set()
        quiet = 0
        for _ in range(_MAX_SCANS):
            new = set(self.list_descendants(base)) - judged
            for pid in new:
                if not started.checkpoint or self._belongs_to_cell(pid, started, since_s):
                    _kill(pid)
            judged |= new
            quiet = 0 if new else quiet + 1
            if quiet == 2:  # one scan may miss a process that is reparented to the base
                return True
        return False

    def _belongs_to_cell(self, pid: int, started: CallStarted, since_s: float) -> bool:
        own_id = self._read_namespace_pid(pid)
        stat = _read(self._proc_fd, f"{pid}/stat")
        if own_id is None or not stat:
            return False
        if own_id in (started.checkpoint, started.worker):
            return own_id == started.worker
        later_s = int(stat.rpartition(b")")[2].split()[19]) * TICK_S - since_s
        # Pids grow until they wrap around, which takes longer than two ticks.
        return own_id > started.checkpoint if abs(later_s) < 2 * TICK_S else later_s > 0

    def _read_namespace_pid(self, pid: int) -> int | None:
        for line in _read(self._proc_fd, f"{pid}/status").splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(folder: int, path: str, max_bytes: int = _UNLIMITED) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return b""
    try:
        content = b""
        while len(content) < max_bytes and (chunk := os.read(fd, 65_536)):
            content += chunk
        return content
    except OSError:
        return b""
    finally:
        os.close(fd)
