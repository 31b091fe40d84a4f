"""The forked processes of a fork server, as it sees them: pipes, sockets, what they have written. Standard library only."""

import os
import socket

from sandbox.inside.calls import Outcome, Started, parse
from sandbox.inside.frames import Frame

_CHUNK = 65_536
_PARTS = {"ok": 1, "memory": 1, "raised": 3}
_PROGRAM_PARTS = {**_PARTS, "exit": 2}
_SESSION_PARTS = {**_PARTS, "died": 2, "lost": 1}
_LAST_READS = 32  # after a process has ended: its pipes hold 1 MiB each at most, unless something still writes


class Captured:
    """One output pipe's reading end. Keeps the first `limit` bytes and counts the others."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self._limit = limit
        self._kept = bytearray()
        self._cut = 0

    def drain(self) -> bool:
        """Takes what is there now, bounded. False once nobody can write any more."""
        for _ in range(_LAST_READS):
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            room = max(0, self._limit - len(self._kept))
            self._kept += chunk[:room]
            self._cut += max(0, len(chunk) - room)
            if len(chunk) < _CHUNK // 16:
                return True
        return True

    def take(self) -> tuple[str, int]:
        """(text, bytes cut) since the last take. Bytes that are no UTF-8 become \\xNN."""
        kept, cut = bytes(self._kept), self._cut
        self._kept.clear()
        self._cut = 0
        if cut:
            kept = _whole_characters(kept)
        return kept.decode("utf-8", "backslashreplace"), cut


def _whole_characters(text: bytes) -> bytes:
    """Without the first bytes of a character that the limit cut through."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text[:-back] if length > back else text
        if byte & 0xC0 != 0x80:
            return text
    return text


class Child:
    """A process that waits for its first call, runs one, or holds a session between two; or a session's first one."""

    def __init__(
        self, pid: int, control: socket.socket, stdout: Captured, stderr: Captured, folder: str | None
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.control = control
        self.streams = (stdout, stderr)
        self.folder = folder
        self.user: int | None = None  # that it runs as, if it is one of its own
        self.session: int | None = None
        self.call: Frame | None = None  # what it runs now
        self.serial = 0  # of the call: timers of an earlier call no longer mean it
        self.began_at = 0.0
        self.deadline = 0.0
        self.worker: int | None = None  # who runs the call, once it was looked at
        self.cpu_s = 0.0  # of the worker before this call
        self.waited_s = 0.0  # of the worker for a processor, before this call
        self.looked_at: float | None = None  # as a long call
        self.family_cpu_s = 0.0  # of all its processes, when they were looked at
        self.stopped_at: float | None = None  # until its next turn
        self.stopped_s = 0.0
        self.over: str | None = None  # why the fork server ended the call: "timeout" or "memory"
        self.ending = False  # its session is to go on from the state before the cell; what runs has been killed
        self.cancelled = False
        self.killed = False  # by the fork server, for whatever reason
        self.watched = False  # its pipes are in the poll set
        self.unsent = b""
        self.nonce = 0
        self.started: Started | None = None  # what a session said of an earlier cell holds until it says something else
        self.outcome: Outcome | None = None
        self.cells = 0  # that the session's state holds
        self._received = b""

    @property
    def fds(self) -> tuple[int, int, int, int]:
        return self.control.fileno(), self.pidfd, self.streams[0].fd, self.streams[1].fd

    def begin(self, call: Frame, nonce: int, now: float, limit_s: float) -> None:
        self.call = call
        self.nonce = nonce
        self.serial += 1
        self.began_at = now
        self.deadline = now + limit_s
        self.worker = self.looked_at = self.over = None
        self.stopped_s = 0.0
        self.ending = False
        self.outcome = None
        self._received = b""

    def forget_call(self) -> None:
        self.call = self.outcome = None
        self.unsent = self._received = b""

    def note_start(self, now: float) -> bool:
        """Whether the code has begun; `began_at` is then when it did, and not when the process was given the call.

        An earlier cell may have changed what this process takes for the time: a time to come is not believed.
        """
        if self.started is None:
            return False
        if self.began_at < self.started.at <= now:
            self.began_at = self.started.at
        return True

    def send(self) -> bool:
        """Passes on what the socket takes. True when all is sent."""
        while self.unsent:
            try:
                sent = self.control.send(self.unsent)
            except BlockingIOError:
                return False
            except OSError:
                self.unsent = b""  # it has ended, or closed its socket: the exit tells
                break
            self.unsent = self.unsent[sent:]
        return True

    def read_outcome(self, limit: int) -> bool:
        """Takes what the process says of its call. False if it says what it must not: it is to be ended."""
        while True:
            try:
                chunk = self.control.recv(_CHUNK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not chunk:
                return False  # closed: it has ended, or the code closed what it must not
            self._received += chunk
            if len(self._received) > limit or not self._accepts():
                return False
            if len(chunk) < _CHUNK:
                return True

    def _accepts(self) -> bool:
        """False if what has come so far can be no answer to this process's call."""
        try:
            started, answer = parse(self._received)
        except ValueError:
            return False
        self.started = started or self.started
        if answer is None:
            return self.call is not None
        outcome = answer.outcome
        parts = _PROGRAM_PARTS if self.session is None else _SESSION_PARTS
        if self.call is None or answer.nonce != self.nonce or len(outcome) != parts.get(outcome[0]):
            return False
        if outcome[0] in ("exit", "died") and not _is_exit_code(outcome[1]):
            return False
        self.outcome, self.cells = outcome, answer.cells
        return True

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)
        for stream in self.streams:
            os.close(stream.fd)


def _is_exit_code(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 3
