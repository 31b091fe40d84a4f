"""A memory cgroup for each call: the kernel counts all memory of the call, and kills only inside it.

The executor creates the folder of this fork server, owned by the fork server's user, and passes its
descriptor (asterism.sandbox.hosts.cgroup_folders). A forked process joins its cgroup before it isolates itself.
An empty cgroup serves a later call, because a new one costs more than a tenth of a small call.
"""

import contextlib
import os
import socket
from typing import NamedTuple

MAX_MEMORY_FACTOR = 1.25  # cgroup limit over memory_mib; allows page tables, copied pages of the zygote, and files
_MAX_REST_SHARE = 1 / 32  # memory that an ended call may leave to the next one, as a share of the limit
_MAX_FREE_CGROUPS = 32


class _CgroupFiles(NamedTuple):
    """The files of a cgroup version. A key names a line; without a key, the file contains one number."""

    limit: str
    usage: str
    no_swap: str  # 0 keeps anonymous memory out of swap; some kernels lack the file
    kills: tuple[str, str]  # number of the cgroup's processes that any OOM killer killed
    limit_hits: tuple[str, str]  # number of allocations that failed for the cgroup's own limit


_VERSION_1 = _CgroupFiles(
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    no_swap="memory.swappiness",
    kills=("memory.oom_control", "oom_kill"),
    limit_hits=("memory.failcnt", ""),
)
_VERSION_2 = _CgroupFiles(
    limit="memory.max",
    usage="memory.current",
    no_swap="memory.swap.max",
    kills=("memory.events", "oom_kill"),
    limit_hits=("memory.events", "oom"),
)


class CallCgroup:
    """The cgroup of a call's process and its descendants. `folder_fd` is the descriptor of its parent folder."""

    def __init__(self, folder_fd: int, name: str, files: _CgroupFiles, memory: int) -> None:
        self.name = name
        self._folder_fd = folder_fd
        self._files = files
        self._limit = int(memory * MAX_MEMORY_FACTOR)
        self._num_killed = self._num_limit_hits = 0  # counts at the last check
        self._culprit: str | None = None  # culprit in this call

    def create(self) -> None:
        """Create the cgroup with its limits. Raises OSError."""
        os.mkdir(self.name, 0o755, dir_fd=self._folder_fd)
        self._write(self._files.limit, self._limit)
        with contextlib.suppress(OSError):
            self._write(self._files.no_swap, 0)

    def open_members(self) -> int:
        """Return a descriptor; a process joins by writing "0" to it. Raises OSError."""
        return os.open(f"{self.name}/cgroup.procs", os.O_WRONLY, dir_fd=self._folder_fd)

    def begin_call(self) -> None:
        self._culprit = None

    def has_room_for_checkpoint(self) -> bool:
        """Return whether a notebook's state fits into the limit twice: a cell may change all of it."""
        try:
            return 2 * self._read(self._files.usage) <= self._limit
        except OSError:  # no descriptor is left
            return False

    def find_culprit(self) -> str | None:
        """Return "call" or "machine", whose limit made the kernel kill a process of this call, or None without a kill.

        Several processes of a call can fail to allocate at once, and the kernel then kills some of them later.
        Kills after the first one for the call's limit therefore have the same culprit. Without a free descriptor,
        the result is the culprit of the last check.
        """
        try:
            num_killed = self._read(*self._files.kills)
            num_limit_hits = self._read(*self._files.limit_hits) if num_killed != self._num_killed else 0
        except OSError:
            return self._culprit
        if num_killed != self._num_killed:
            if self._culprit != "call":
                self._culprit = "call" if num_limit_hits > self._num_limit_hits else "machine"
            self._num_killed, self._num_limit_hits = num_killed, num_limit_hits
        return self._culprit

    def is_reusable(self) -> bool:
        """Return whether the processes left little memory and no count of failed allocations."""
        try:
            used, num_limit_hits = self._read(self._files.usage), self._read(*self._files.limit_hits)
        except OSError:  # no descriptor is left
            return False
        return used <= self._limit * _MAX_REST_SHARE and not num_limit_hits

    def remove(self) -> bool:
        """Remove the cgroup. Return False while it has processes."""
        try:
            os.rmdir(self.name, dir_fd=self._folder_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _write(self, file: str, number: int) -> None:
        fd = os.open(f"{self.name}/{file}", os.O_WRONLY, dir_fd=self._folder_fd)
        try:
            os.write(fd, str(number).encode())
        finally:
            os.close(fd)

    def _read(self, file: str, key: str = "") -> int:
        fd = os.open(f"{self.name}/{file}", os.O_RDONLY, dir_fd=self._folder_fd)
        try:
            text = os.read(fd, 4096).decode()
        finally:
            os.close(fd)
        return int(dict(line.split() for line in text.splitlines()).get(key, 0) if key else text)


class CallCgroups:
    """Creates, reuses and removes the cgroups of a fork server's calls."""

    def __init__(self, folder_fd: int, memory_mib: int) -> None:
        self.folder_fd = folder_fd
        self._memory = memory_mib << 20
        version_1 = _VERSION_1.limit in os.listdir(folder_fd)
        self._files = _VERSION_1 if version_1 else _VERSION_2
        self._num_created = 0
        self._free: list[CallCgroup] = []
        self._ending: list[CallCgroup] = []  # cgroups with processes that still exit

    def acquire(self) -> CallCgroup:
        """Return an empty cgroup. Raises OSError."""
        if self._free:
            cgroup = self._free.pop()
            cgroup.begin_call()
            return cgroup
        self._num_created += 1
        cgroup = CallCgroup(self.folder_fd, f"call-{self._num_created}", self._files, self._memory)
        try:
            cgroup.create()
        except OSError:
            cgroup.remove()
            raise
        return cgroup

    def release(self, cgroup: CallCgroup, *, was_short: bool = False) -> None:
        """Free a cgroup after the exit of its processes. A check for reuse would cost a short call 1% of its time."""
        if len(self._free) < _MAX_FREE_CGROUPS and (was_short or cgroup.is_reusable()):
            self._free.append(cgroup)
        else:
            self._ending = [ending for ending in (*self._ending, cgroup) if not ending.remove()]


def receive_call_cgroups(executor: socket.socket, memory_mib: int) -> CallCgroups | None:
    """Receive the descriptor of the cgroup folder from the executor; return None if it sends no descriptor."""
    _, fds, _, _ = socket.recv_fds(executor, 1, 1)
    return CallCgroups(fds[0], memory_mib) if fds else None


def can_join(cgroups: CallCgroups) -> bool:
    try:
        cgroup = cgroups.acquire()
        members = cgroup.open_members()
    except OSError:
        return False
    pid = os.fork()
    if pid == 0:
        try:
            os.write(members, b"0")
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(members)
    _, status = os.waitpid(pid, 0)
    cgroups.release(cgroup)
    return status == 0
