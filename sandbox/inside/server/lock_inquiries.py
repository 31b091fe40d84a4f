"""Answers fcntl(F_GETLK), with which a call queries locks of other processes.

Library files are the same inodes in all calls. A read lock on a library file is allowed and conflicts with no lock, but
F_GETLK would show it: two calls could exchange bits. SQLite needs F_GETLK for its write-ahead logs
and after crashes. The fork server's filter therefore passes F_GETLK to a separate process, which answers
for files of the call's folder and refuses all other files. This process holds no data of any call and
has the lowest priority.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH123

import errno
import fcntl
import os
import signal
import struct
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from asterism.sandbox.inside.isolation import syscalls
from asterism.sandbox.inside.isolation.namespaces import DEVICES, SCRATCH

_RECEIVE, _SEND, _IS_VALID = 0xC050_2100, 0xC018_2101, 0x4008_2102  # ioctls of a seccomp listener
_NOTIFICATION = struct.Struct("<QIIiIQ6Q")  # id, pid, flags; number, machine, address and arguments of the call
_ANSWER = struct.Struct("<QqiI")  # id, result, negative error, flags
_FLOCK = struct.Struct("<hh4xqqi4x")  # type, whence, start, length, pid
_MAX_OFFSET = (1 << 63) - 1
_LOWEST_PRIORITY = 19
_F_OFD_SETLK = 37


class _Lock(NamedTuple):
    kind: int  # F_RDLCK or F_WRLCK
    owner: int  # pid; -1: an open file holds the lock
    first: int
    last: int


def hold_devices() -> None:
    """Hold read locks on the devices until this process ends, so that no call can take write locks as a signal.

    A device stays unlocked while another program of the machine has a write lock on it.
    """
    for name in DEVICES:
        device = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.fcntl(device, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            os.close(device)


def start_answering(listener: int, proc_fd: int, private_fds: Sequence[int]) -> None:
    """Fork the answering process, which ends with this process. `proc_fd` is a descriptor of /proc. Raises OSError."""
    pid = os.fork()
    if pid:
        os.close(listener)  # when the other process ends, F_GETLK fails
        return
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        for fd in private_fds:
            os.close(fd)
        os.nice(_LOWEST_PRIORITY)
        _answer_all(listener, proc_fd)
    finally:
        os._exit(1)


def _answer_all(listener: int, proc_fd: int) -> NoReturn:
    while True:
        received = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, received)
        except (FileNotFoundError, InterruptedError):  # the inquiring process has ended
            continue
        number, pid, _, _, _, _, fd, _, address, *_ = _NOTIFICATION.unpack(received)
        error = 0
        try:
            _Inquiry(proc_fd, pid, fd, address, listener, number).answer()
        except OSError as refusal:
            error = -(refusal.errno or errno.EPERM)
        try:
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(number, 0, error, 0))
        except FileNotFoundError:
            continue


class _Inquiry(NamedTuple):
    """An inquiry of thread `pid` about descriptor `fd`; the lock's description is at `address` of its memory."""

    proc_fd: int
    pid: int
    fd: int
    address: int
    listener: int
    number: int  # id of this inquiry

    def answer(self) -> None:
        """Write the answer into the thread's memory. Raises OSError if the thread has ended or has no permission."""
        file = os.stat(f"{self.pid}/fd/{self.fd}", dir_fd=self.proc_fd)
        if file.st_dev != os.stat(f"{self.pid}/root{SCRATCH}", dir_fd=self.proc_fd).st_dev:
            raise PermissionError(errno.EPERM, "not a file of the call")
        memory = os.open(f"{self.pid}/mem", os.O_RDWR, dir_fd=self.proc_fd)
        try:
            # Raises if the thread has ended and another thread has its pid.
            fcntl.ioctl(self.listener, _IS_VALID, self.number.to_bytes(8, "little"))
            asked = os.pread(memory, _FLOCK.size, self.address)
            os.pwrite(memory, self._find_conflict(asked, file), self.address)
        finally:
            os.close(memory)

    def _find_conflict(self, asked: bytes, file: os.stat_result) -> bytes:
        kind, whence, start, length, pid = _FLOCK.unpack(asked)
        first, last = self._find_range(whence, start, length, file)
        if kind not in (fcntl.F_RDLCK, fcntl.F_WRLCK) or first < 0 or last < first:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        own = int(self._read_status("Tgid"))
        for lock in self._list_locks(file):
            excludes = fcntl.F_WRLCK in (kind, lock.kind)
            if excludes and lock.owner != own and lock.first <= last and first <= lock.last:
                size = 0 if lock.last == _MAX_OFFSET else lock.last - lock.first + 1
                return _FLOCK.pack(lock.kind, os.SEEK_SET, lock.first, size, self._translate(lock.owner))
        return _FLOCK.pack(fcntl.F_UNLCK, whence, start, length, pid)

    def _find_range(self, whence: int, start: int, length: int, file: os.stat_result) -> tuple[int, int]:
        """Return the (first, last) byte; `start` can count from the position or the end of the file."""
        origin = {os.SEEK_SET: 0, os.SEEK_END: file.st_size}.get(whence)
        if origin is None:
            origin = int(self._read(f"{self.pid}/fdinfo/{self.fd}").split("pos:")[1].split()[0])
        start += origin
        if length < 0:
            return start + length, start - 1
        return start, start + length - 1 if length else _MAX_OFFSET

    def _list_locks(self, file: os.stat_result) -> list[_Lock]:
        """Return the locks of this pid namespace's processes on the file, ordered by their first byte."""
        inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        lines = [line.split() for line in self._read("locks").splitlines()]
        locks = [
            _Lock(
                fcntl.F_WRLCK if words[3] == "WRITE" else fcntl.F_RDLCK,
                int(words[4]),
                int(words[6]),
                _MAX_OFFSET if words[7] == "EOF" else int(words[7]),
            )
            for words in lines
            if words[1] in ("POSIX", "OFDLCK") and words[5] == inode
        ]
        return sorted(locks, key=lambda lock: lock.first)

    def _translate(self, pid: int) -> int:
        """Return the process's pid in its own namespace, which the inquiring thread uses."""
        try:
            return int(self._read_status("NSpid", pid).split()[-1]) if pid > 0 else pid
        except OSError:  # the process has ended
            return 0

    def _read_status(self, name: str, pid: int | None = None) -> str:
        text = self._read(f"{self.pid if pid is None else pid}/status")
        return text.split(f"\n{name}:")[1].split("\n")[0].strip()

    def _read(self, path: str) -> str:
        fd = os.open(path, os.O_RDONLY, dir_fd=self.proc_fd)
        with open(fd) as file:
            return file.read()
