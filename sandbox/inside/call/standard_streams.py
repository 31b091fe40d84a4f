"""Makes the standard streams of executed code, as an ordinary interpreter does, and repairs them before a cell.

A stream object remembers whether its descriptor can seek. The zygote starts with /dev/null as its
output, but calls have pipes. The zygote therefore makes new objects on a pipe: with the old objects,
`sys.stdout.reconfigure(...)` and `io.TextIOWrapper(sys.stdout.buffer)` would raise "Illegal seek".
"""

import fcntl
import io
import os
import resource
import sys
from typing import TextIO

_STANDARD_FDS = (0, 1, 2)
_NAMES = ("stdin", "stdout", "stderr")
_MAX_KEPT = 64  # limit of kept objects that cells have replaced; about 10 kB each


def renew_output_objects() -> None:
    """Replace stdout and stderr by objects of a pipe, for all processes that this process forks."""
    saved = [os.dup(fd) for fd in _STANDARD_FDS[1:]]
    read_end, write_end = os.pipe()
    try:
        for fd in _STANDARD_FDS[1:]:
            os.dup2(write_end, fd)
            _set_object(fd, _make_object(fd))
    finally:
        for fd, original in zip(_STANDARD_FDS[1:], saved, strict=True):
            os.dup2(original, fd)
            os.close(original)
        os.close(read_end)
        os.close(write_end)


def _make_object(fd: int) -> TextIO:
    """Make the object that an interpreter with line-buffered output has."""
    raw = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
    raw.name = f"<{_NAMES[fd]}>"
    binary = io.BufferedReader(raw) if fd == 0 else io.BufferedWriter(raw)
    errors = "surrogateescape" if fd == 0 else "backslashreplace"
    stream = io.TextIOWrapper(binary, "utf-8", errors, newline=None if fd == 0 else "\n", line_buffering=fd > 0)
    stream.mode = "r" if fd == 0 else "w"  # pyright: ignore[reportAttributeAccessIssue]
    return stream


def _set_object(fd: int, stream: TextIO | None) -> None:
    setattr(sys, _NAMES[fd], stream)
    setattr(sys, f"__{_NAMES[fd]}__", stream)


class NotebookStreams:
    """Private duplicates of a notebook's descriptors 0 to 2, and its stream objects.

    A cell may close or replace both. In an ordinary interpreter this would end the output of all
    later code; in a notebook each cell begins with usable streams. If a cell also closes the
    duplicates, which are the highest descriptors, its streams stay as they are.
    """

    def __init__(self) -> None:
        highest = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(_STANDARD_FDS)
        self._duplicates = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest) for fd in _STANDARD_FDS]
        self._identities = [_identify(fd) for fd in self._duplicates]
        self._own = [sys.stdin, sys.stdout, sys.stderr]
        self._kept: list[TextIO] = []

    def restore(self) -> None:
        """Repair the streams before a cell. A replaced and usable `sys.stdin` stays."""
        renewed = [fd for fd in _STANDARD_FDS if self._must_renew(fd)]
        for fd, duplicate, identity in zip(_STANDARD_FDS, self._duplicates, self._identities, strict=True):
            if _identify(fd) != identity and _identify(duplicate) == identity:
                os.dup2(duplicate, fd)
        for fd in renewed:
            try:
                self._own[fd] = _make_object(fd)
            except OSError:  # no descriptor is free, and the duplicate is closed
                continue
            _set_object(fd, self._own[fd])

    def _must_renew(self, fd: int) -> bool:
        own, current = self._own[fd], getattr(sys, _NAMES[fd], None)
        if current is own and _is_usable(own):
            return False
        if fd == 0 and current is not own and current is not None:
            return False
        # A deleted wrapper would close its buffer, which the new object may share; later code may also use it.
        self._kept += [stream for stream in (own, current) if type(stream) is io.TextIOWrapper]
        del self._kept[:-_MAX_KEPT]
        return True


def _is_usable(stream: TextIO) -> bool:
    """Return whether the stream is open and attached, and can write its pending output."""
    try:
        if stream.closed:
            return False
        if stream.writable():
            stream.flush()
    except BaseException:  # the code may have replaced the methods
        return False
    return True


def _identify(fd: int) -> tuple[int, int] | None:
    """Return the device and the number of the open file, or None if the descriptor is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
