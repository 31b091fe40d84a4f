"""The fork server: one thread that forks an isolated process for each call and enforces its limits.

`asterism.sandbox.inside.server.boot` starts it.

    executor -> fork server   {"op": "run" | "cell", "id", "code", "stdin", "seed", "session", "cells"}
                              {"op": "end", "session"}     {"op": "kill", "id"}     {"op": "ping", "id"}
                              {"op": "measure", "id"}      {"op": "end_spares", "pause_s"}
    fork server -> executor   {"hello": ...} or {"refused": cause}, once
                              {"id", "kind", "details", "stdout", "stderr", "stdout_cut", "stderr_cut",
                               "duration_s", "cells"}, once per call
                              {"id"}, once per ping
                              {"id", "sizes": bytes by notebook}, once per measurement

"session" is a notebook's id. "kind" and "details" are an outcome (asterism.sandbox.inside.call.run_code),
or "timeout", "died" (exit code), "failed" (cause: the machine lacked processes, descriptors or memory),
or "lost": the notebook's state does not have the `cells` that the call expects, and the cell did not
run. `cells` of an answer is the number of cells in the state now. Output of the code cannot become a
frame: this process reads it from pipes and quotes it.

A notebook's processes live until "end". If a cell crashes or exceeds a limit, all processes that it
started are killed and the notebook rolls back to the state before the cell
(asterism.sandbox.inside.call.notebook_process). If the rollback fails, the notebook ends, and `cells` is 0.
The executor bounds the number of calls and notebooks.
"""

import os
import select
import socket
import time
from collections import deque

from asterism.sandbox.inside.call.call_process import CallIsolation
from asterism.sandbox.inside.server.call_cgroups import CallCgroups
from asterism.sandbox.inside.server.call_ending import CallKiller, ExitClassifier
from asterism.sandbox.inside.server.call_footprint import CallFootprint
from asterism.sandbox.inside.server.call_monitor import MAX_OUTCOME_BYTES, CallMonitor
from asterism.sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from asterism.sandbox.inside.server.orphan_reaper import kill_orphans
from asterism.sandbox.inside.server.proc_usage import ProcessUsage
from asterism.sandbox.inside.server.process_tree import ProcessTree
from asterism.sandbox.inside.server.warm_processes import WarmProcesses
from asterism.sandbox.inside.wire.call_wire import CELL, CELL_WITHOUT_CHECKPOINT, PROGRAM, CallOutcome, encode_call
from asterism.sandbox.inside.wire.frames import Frame, FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.inside.zygote.zygote import Zygote

_CHUNK = 1 << 16  # libc would map and unmap a larger buffer for each read
_MAX_FORKS_PER_LOOP = 2


class ForkServer:
    """Consumes the executor's frames, produces one answer per call; waits in `epoll`."""

    def __init__(
        self,
        settings: ServerSettings,
        executor: socket.socket,
        isolation: CallIsolation,
        zygote: Zygote,
        folder: str | None,
        cgroups: CallCgroups | None,
    ) -> None:
        self._settings = settings
        self._own_namespaces = isolation.own_namespaces
        self._zygote_pid = zygote.pid
        self._executor = executor
        self._reader = FrameReader()
        self._poll = select.epoll()
        self._poll.register(executor, select.EPOLLIN)
        self._pending: deque[Frame] = deque()  # the executor's requests, in order
        self._processes_by_fd: dict[int, CallProcess] = {}
        self._processes_by_call: dict[int, CallProcess] = {}
        self._process_tree = ProcessTree(isolation.proc_fd)
        self._warm = WarmProcesses(settings, zygote, self._process_tree, folder, cgroups, isolation.own_users)
        self._notebooks = NotebookProcesses(self._process_tree)
        self._usage = usage = ProcessUsage(self._process_tree, zygote.pid)
        self._exits = ExitClassifier(settings, isolation.own_namespaces, usage)
        self._killer = CallKiller(self._notebooks, self._process_tree, isolation.own_namespaces)
        self._footprint = CallFootprint(settings.memory_mib << 20, isolation.own_users, usage, self._notebooks)
        self._monitor = CallMonitor(settings, usage, self._notebooks, self._footprint, self._killer, self)

    def serve(self) -> None:
        """Serve the executor until it closes its end."""
        while True:
            can_fork = self._warm.lacks_process(idle=not self._processes_by_call)
            events = self._poll.poll(0 if can_fork or self._pending else self._monitor.get_wait_s())
            if not events and can_fork and not self._pending:
                self._fork(as_notebook=self._warm.is_full)
            for fd, _ in events:
                if fd == self._executor.fileno():
                    if not self._read_executor():
                        return
                elif (child := self._processes_by_fd.get(fd)) is not None:
                    self._on_child(child, fd)
            self._handle_pending()
            self._monitor.run_timers()

    def kill_all(self) -> None:
        """Kill all calls and their descendants; in a pid namespace, leave this to the kernel."""
        if not self._own_namespaces:
            for child in set(self._processes_by_fd.values()):
                self._killer.kill(child)
            kill_orphans(self._process_tree, set())

    # ------------------------------------------------------------ calls

    def _read_executor(self) -> bool:
        chunk = self._executor.recv(_CHUNK)
        if not chunk:
            return False
        self._pending.extend(self._reader.feed(chunk))
        return True

    def _handle_pending(self) -> None:
        """Fork few processes per loop: exits and full pipes must not wait for many forks."""
        num_forks = 0
        while self._pending and num_forks < _MAX_FORKS_PER_LOOP:
            if self._needs_process():
                num_forks += 1
                if not self._warm.has_process(notebook=self._pending[0]["op"] == "cell") and (cause := self._fork()):
                    self._send({"id": self._pending.popleft()["id"], "kind": "failed", "details": [cause], "cells": 0})
                    continue
            self._handle(self._pending.popleft())

    def _needs_process(self) -> bool:
        frame = self._pending[0]
        if frame["op"] == "cell":
            return not frame["cells"] and self._notebooks.get(frame["session"]) is None
        return frame["op"] == "run"

    def _handle(self, frame: Frame) -> None:
        match frame["op"]:
            case "run":
                self._start(self._warm.take(notebook=False), frame, PROGRAM)
            case "cell":
                self._start_cell(frame)
            case "end":
                self._killer.kill(self._notebooks.get(frame["session"]))
            case "kill":
                self._killer.kill(self._processes_by_call.get(frame["id"]))
            case "ping":
                self._send({"id": frame["id"]})
            case "end_spares":
                for spare in self._warm.remove_spare_notebooks(frame["pause_s"]):
                    self._killer.kill(spare)
            case "measure":
                self._send({"id": frame["id"], "sizes": self._usage.measure_notebooks(self._notebooks.list_pids())})
            case _:
                raise ValueError(f"unknown op {frame['op']}")

    def _start_cell(self, call: Frame) -> None:
        child = self._notebooks.get(call["session"])
        if child is None and call["cells"]:
            self._send({"id": call["id"], "kind": "lost", "cells": 0})
            return
        if child is None:
            child = self._warm.take(notebook=True)
            self._notebooks.add(call["session"], child)
        elif child.cgroup is not None:
            child.cgroup.begin_call()
        self._monitor.release(child)
        child.drop_output()
        self._start(child, call, CELL if self._footprint.has_room_for_checkpoint(child) else CELL_WITHOUT_CHECKPOINT)

    def _start(self, child: CallProcess, call: Frame, kind: int) -> None:
        nonce = int.from_bytes(os.urandom(8), "little")
        now = time.monotonic()
        child.assign_call(call, nonce, now, self._settings.time_limit_s)
        self._processes_by_call[call["id"]] = child
        child.unsent = encode_call(kind, call["cells"], call["seed"], nonce, call["code"], call["stdin"])
        try:
            self._send_call(child)
        except OSError as error:
            self._killer.fail(child, error)
        self._monitor.on_call_started(child, now)

    def _send_call(self, child: CallProcess) -> None:
        fd = child.control.fileno()
        if child.notebook_id is not None:
            self._register(child, fd)
        if not child.send():
            self._register(child, fd)
            self._poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    # ------------------------------------------------------------ events

    def _on_child(self, child: CallProcess, fd: int) -> None:
        if fd == child.pidfd:
            self._reap(child)
            return
        try:
            self._on_bytes(child, fd)
        except OSError as error:
            self._killer.fail(child, error)

    def _on_bytes(self, child: CallProcess, fd: int) -> None:
        if fd == child.control.fileno():
            if child.unsent and child.send():
                self._poll.modify(fd, select.EPOLLIN)
            self.receive_reply(child)
        else:
            for stream in child.streams:
                if stream.fd == fd and not stream.drain():
                    self._unregister(fd)

    def receive_reply(self, child: CallProcess) -> bool:
        """Read the process's reply. Return whether its call continues."""
        if not child.read_outcome(MAX_OUTCOME_BYTES):
            self._unregister(child.control.fileno())
            if child.notebook_id is not None or child.has_invalid_reply:
                child.outcome = child.outcome or self._exits.find_oom_kill(child)
                self._killer.kill(child)
            return False
        if child.call and child.outcome:
            if child.notebook_id is not None:
                self._finish_cell(child, child.outcome)
                return False
            self._monitor.on_program_answered(child)
        return True

    def _finish_cell(self, child: CallProcess, outcome: CallOutcome) -> None:
        has_died = outcome[0] == "died"
        child.outcome = outcome = self._exits.correct_for_oom_kill(child, outcome)
        if has_died and not self._notebooks.kill_cell(child):
            self._killer.kill(child)
            return
        child.drain_output()
        if child.pipes_polled:
            child.pipes_polled = False
            for stream in child.streams:
                self._unregister(stream.fd)
        self._send_answer(child, outcome)

    def _reap(self, child: CallProcess) -> None:
        _, status, taken = os.wait4(child.pid, 0)
        for fd in child.fds:
            self._unregister(fd)
        if not self._own_namespaces:  # orphans of the call have become this process's children
            known = {self._zygote_pid, *(other.pid for other in self._processes_by_fd.values())}
            kill_orphans(self._process_tree, known)
        self._notebooks.discard(child)
        self._monitor.forget(child)
        if child.call is not None:
            child.drain_output()
            child.read_outcome(MAX_OUTCOME_BYTES)
            child.num_cells = 0
            cpu_s = taken.ru_utime + taken.ru_stime
            outcome = child.outcome or self._exits.classify(child, os.waitstatus_to_exitcode(status), cpu_s)
            self._send_answer(child, self._exits.correct_for_oom_kill(child, outcome))
        child.close()
        self._warm.release(child)

    def _send_answer(self, child: CallProcess, outcome: CallOutcome) -> None:
        assert child.call is not None
        now = time.monotonic()
        child.update_start(now)
        self._processes_by_call.pop(child.call["id"], None)
        self._monitor.on_call_ended(child, now)
        answer = child.build_answer(outcome, now)
        child.clear_call()
        self._send(answer)

    def _send(self, frame: Frame) -> None:
        self._executor.sendall(encode_frame(frame))

    def poll_pipes(self, child: CallProcess) -> None:
        """Read the process's pipes and socket from now on."""
        self._register(child, child.control.fileno())
        for stream in child.streams:
            self._register(child, stream.fd)

    # ------------------------------------------------------------ processes

    def _fork(self, *, as_notebook: bool = False) -> str | None:
        """Fork a process ahead of its call. Return the cause of a failure."""
        try:
            child = self._warm.fork(as_notebook=as_notebook)
        except ConnectionError:  # the zygote has ended
            raise
        except OSError as error:
            return f"no process for a call: {error.strerror}"
        try:
            self._register(child, child.pidfd)
        except OSError as error:
            self._warm.discard(child)
            return f"no process for a call: {error.strerror}"
        return None

    def _register(self, child: CallProcess, fd: int) -> None:
        """Watch a descriptor. Raises OSError: the kernel bounds the watches of a user."""
        if fd not in self._processes_by_fd:
            self._poll.register(fd, select.EPOLLIN)
            self._processes_by_fd[fd] = child

    def _unregister(self, fd: int) -> None:
        if self._processes_by_fd.pop(fd, None) is not None:
            self._poll.unregister(fd)
