"""A fork server's handle of a forked process: pipes, socket, and state of its call."""

import os
import signal
import socket

from asterism.sandbox.inside.server.call_cgroups import CallCgroup
from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.server.starvation import STARVED
from asterism.sandbox.inside.wire.call_wire import STARVED_CAUSE, CallOutcome, CallStarted, parse_reply
from asterism.sandbox.inside.wire.frames import Frame

_CHUNK = 65_536
_OUTCOME_PARTS = {"ok": 1, "memory": 1, "raised": 3}
_PROGRAM_PARTS = {**_OUTCOME_PARTS, "exit": 2}
_NOTEBOOK_PARTS = {**_OUTCOME_PARTS, "died": 2, "lost": 1}
_MAX_READS = 32  # chunks per drain: a pipe holds 1 MiB at most, unless a process still writes


class OutputPipe:
    """The read end of an output pipe. It keeps the first `limit` bytes and counts the other bytes."""

    def __init__(self, fd: int, limit: int) -> None:
        self.fd = fd
        self._limit = limit
        self._buffer = bytearray()
        self._num_cut = 0

    def drain(self) -> bool:
        """Read a bounded number of bytes that are in the pipe now. Return False at end of file."""
        for _ in range(_MAX_READS):
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            space = max(0, self._limit - len(self._buffer))
            self._buffer += chunk[:space]
            self._num_cut += max(0, len(chunk) - space)
            if len(chunk) < _CHUNK // 16:
                return True
        return True

    def pop_text(self) -> tuple[str, int]:
        """Return (text, bytes cut) since the last call. Invalid UTF-8 becomes \\xNN."""
        kept, cut = bytes(self._buffer), self._num_cut
        self._buffer.clear()
        self._num_cut = 0
        if cut:
            kept = _trim_partial_character(kept)
        return kept.decode("utf-8", "backslashreplace"), cut


def _trim_partial_character(text: bytes) -> bytes:
    """Remove the first bytes of a character that the limit truncated."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text[:-back] if length > back else text
        if byte & 0xC0 != 0x80:
            return text
    return text


class CallProcess:
    """A process that waits for a call, runs a program, or is the first process of a notebook."""

    def __init__(
        self,
        pid: int,
        control: socket.socket,
        stdout: OutputPipe,
        stderr: OutputPipe,
        folder: str | None,
        uid: int | None,
        cgroup: CallCgroup | None,
    ) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.control = control
        self.streams = (stdout, stderr)
        self.folder = folder
        self.uid = uid  # None: the fork server's own user
        self.cgroup = cgroup
        self.notebook_id: int | None = None
        self.call: Frame | None = None  # the running call
        self.check_at = 0.0  # next check of the monitor
        self.timer_at: float | None = None  # time of the process's timer, which may be due before `check_at`
        self.started_at = self.deadline = 0.0
        self.schedules: dict[int, tuple[float, float]] | None = None  # CPU times and waits before this cell, by pid
        self.sampled_at: float | None = None  # time of the last check of a long call
        self.memory_bytes, self.tree_cpu_s = 0, 0.0  # memory and CPU time of all its processes at the last check
        self.spent_cpu_s = 0.0  # CPU time of all its processes in this call, at the last check
        self.stopped_at: float | None = None  # start of the present stop; None while the process may run
        self.stopped_s = 0.0
        self.exceeded_limit: str | None = None  # limit for which the process is killed: "timeout", "memory" or STARVED
        self.rolling_back = False  # the cell was killed; the checkpoint has not answered yet
        self.killed = False  # killed by the fork server, for any reason
        self.pipes_polled = False  # its pipes are in the poll set
        self.unsent = self._received = b""
        self.nonce = 0
        self.start_report: CallStarted | None = None  # last report; valid until the next report
        self.found_checkpoint: tuple[CallStarted | None, int | None] = (None, None)  # (report, pid of its checkpoint)
        self.outcome: CallOutcome | None = None
        self.has_invalid_reply = False
        self.num_cells = 0  # cells that the notebook's state holds
        self._has_run_code = False  # an earlier call has run code

    @property
    def fds(self) -> tuple[int, int, int, int]:
        return self.control.fileno(), self.pidfd, self.streams[0].fd, self.streams[1].fd

    @property
    def has_begun(self) -> bool:
        """Return whether the model's code may have run."""
        return self.start_report is not None or bool(self._received)

    def assign_call(self, call: Frame, nonce: int, now: float, limit_s: float) -> None:
        self.call = call
        self.nonce = nonce
        self.started_at = now
        self.deadline = now + limit_s
        self.schedules = self.sampled_at = self.exceeded_limit = None
        self.stopped_s = self.spent_cpu_s = self.tree_cpu_s = 0.0
        self.memory_bytes = 0
        self.rolling_back = False
        self.outcome = None
        self._received = b""

    def clear_call(self) -> None:
        self.call = self.outcome = None
        self._has_run_code = True
        self.unsent = self._received = b""

    def drain_output(self) -> None:
        for stream in self.streams:
            stream.drain()

    def drop_output(self) -> None:
        """Drop output that a thread wrote between two cells."""
        for stream in self.streams:
            stream.drain()
            stream.pop_text()

    def update_start(self, now: float) -> bool:
        """Return whether the code has begun; `started_at` then is the start of the code, not of the call.

        Code of an earlier call can forge the report: a later call of the process counts from its beginning.
        """
        if self._has_run_code:
            return True
        if self.start_report is None:
            return False
        if self.started_at < self.start_report.at <= now:
            self.started_at = self.start_report.at
        return True

    def send(self) -> bool:
        """Send as many bytes as the socket accepts. Return whether all are sent."""
        while self.unsent:
            try:
                sent = self.control.send(self.unsent)
            except BlockingIOError:
                return False
            except OSError:
                self.unsent = b""  # the process ended or closed its socket; its exit is reported
                break
            self.unsent = self.unsent[sent:]
        return True

    def read_outcome(self, limit: int) -> bool:
        """Read the reply. Return False if it is invalid (`has_invalid_reply`) or the socket is closed."""
        while True:
            try:
                chunk = self.control.recv(_CHUNK)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not chunk:
                return False
            self._received += chunk
            if len(self._received) > limit or not self._accept_reply():
                self.has_invalid_reply = True
                return False
            if len(chunk) < _CHUNK:
                return True

    def _accept_reply(self) -> bool:
        """Return False if the bytes received so far are no valid reply to this call."""
        try:
            started, answer = parse_reply(self._received)
        except ValueError:
            return False
        self.start_report = started or self.start_report
        if answer is None:
            return self.call is not None
        outcome = answer.outcome
        parts = _PROGRAM_PARTS if self.notebook_id is None else _NOTEBOOK_PARTS
        if self.call is None or answer.nonce != self.nonce or len(outcome) != parts.get(outcome[0]):
            return False
        if outcome[0] in ("exit", "died") and not _is_exit_code(outcome[1], may_be_signal=outcome[0] == "died"):
            return False
        if outcome[0] == "lost" and started is not None:  # a notebook reports a lost state before the code begins
            return False
        self.outcome, self.num_cells = outcome, answer.cells
        return True

    def build_answer(self, outcome: CallOutcome, now: float) -> Frame:
        """Build the frame for the executor and reset the captured output."""
        assert self.call is not None
        stdout, stdout_cut = self.streams[0].pop_text()
        stderr, stderr_cut = self.streams[1].pop_text()
        outcome = self._resolve_outcome(outcome)
        return {
            "id": self.call["id"],
            "kind": outcome[0],
            "details": outcome[1:],
            "stdout": stdout,
            "stderr": stderr,
            "stdout_cut": stdout_cut,
            "stderr_cut": stderr_cut,
            "duration_s": now - self.started_at,
            "cells": self.num_cells,
        }

    def _resolve_outcome(self, outcome: CallOutcome) -> CallOutcome:
        if outcome[0] == "exit":
            return ["died", outcome[1]]
        if outcome[0] == "died" and self.exceeded_limit == STARVED:
            return ["failed", STARVED_CAUSE]
        if outcome[0] == "died" and self.exceeded_limit is not None:
            return [self.exceeded_limit]
        if outcome[0] == "died" and outcome[1] == str(-signal.SIGXCPU):
            return ["timeout"]
        return outcome

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)
        for stream in self.streams:
            os.close(stream.fd)


def _is_exit_code(text: str, *, may_be_signal: bool) -> bool:
    """Return whether the text is an exit code or, with `may_be_signal`, a negative signal number."""
    digits = text.removeprefix("-") if may_be_signal else text
    return digits.isascii() and digits.isdigit() and len(digits) <= 3


class NotebookProcesses:
    """The processes of notebooks. Cells and checkpoints are found by the last start report, which code can forge."""

    def __init__(self, process_tree: ProcessTree) -> None:
        self._process_tree = process_tree
        self._processes: dict[int, CallProcess] = {}  # first processes by notebook id

    def get(self, notebook_id: int) -> CallProcess | None:
        return self._processes.get(notebook_id)

    def list_pids(self) -> dict[int, int]:
        """Return the first process of each notebook."""
        return {notebook_id: child.pid for notebook_id, child in self._processes.items()}

    def add(self, notebook_id: int, child: CallProcess) -> None:
        child.notebook_id = notebook_id
        self._processes[notebook_id] = child

    def discard(self, child: CallProcess) -> None:
        if child.notebook_id is not None and self._processes.get(child.notebook_id) is child:
            del self._processes[child.notebook_id]

    def kill_cell(self, child: CallProcess) -> bool:
        """Kill the cell's processes and no others of its notebook. Return whether this succeeded."""
        return child.start_report is not None and self._process_tree.kill_cell(child.pid, child.start_report)

    def find_checkpoint(self, child: CallProcess) -> int | None:
        """Return the process that the report names as the state before the call, or None for the first process."""
        if child.start_report is None or not child.start_report.checkpoint:
            return None
        report, pid = child.found_checkpoint
        if pid is None or report is not child.start_report:
            pid = self._process_tree.find_descendant(child.pid, child.start_report.checkpoint)
            child.found_checkpoint = child.start_report, pid
        return pid
