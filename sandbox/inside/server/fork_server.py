"""The fork server: one thread that forks an isolated process for each call and enforces its limits.

`sandbox.inside.server.boot` starts it.

    executor -> fork server   {"op": "run" | "cell", "id", "code", "stdin", "seed", "session", "cells"}
                              {"op": "end", "session"}     {"op": "kill", "id"}     {"op": "ping", "id"}
                              {"op": "measure", "id"}      {"op": "end_spares", "pause_s"}
    fork server -> executor   {"hello": ...} or {"refused": cause}, once
                              {"id", "kind", "details", "stdout", "stderr", "stdout_cut", "stderr_cut",
                               "duration_s", "cells"}, once per call
                              {"id"}, once per ping
                              {"id", "sizes": bytes by notebook}, once per measurement

"session" is a notebook's id. "kind" and "details" are an outcome's (sandbox.inside.call.run_code),
or "timeout", "died" (exit code), "failed" (cause): the machine lacked processes, descriptors or
memory, or "lost": the notebook's state does not hold the `cells` that the call expects, and the
cell did not run. An answer's `cells` is the number that the state holds now. Output of the code
cannot become a frame: this process reads it from pipes and quotes it.

A notebook's processes live until "end". If a cell dies or exceeds a limit, all that it started is
killed and the notebook rolls back to the state before the cell
(sandbox.inside.call.notebook_process). If the rollback fails, the notebook ends, and `cells` is 0.
The executor bounds the number of calls and notebooks.
"""

import os
import select
import signal
import socket
import time
from collections import deque

from sandbox.inside.call.call_process import CallIsolation
from sandbox.inside.call.notebook_process import FORK_FAILED_EXIT_CODE
from sandbox.inside.server.call_cgroups import CallCgroups
from sandbox.inside.server.call_monitor import MAX_OUTCOME_BYTES, CallMonitor
from sandbox.inside.server.call_process_handle import CallProcess, NotebookProcesses
from sandbox.inside.server.orphan_reaper import kill_groups, kill_orphans
from sandbox.inside.server.proc_usage import ProcessUsage
from sandbox.inside.server.process_tree import ProcessTree
from sandbox.inside.server.warm_processes import WarmProcesses
from sandbox.inside.wire.call_wire import CELL, CELL_WITHOUT_CHECKPOINT, PROGRAM, CallOutcome, encode_call
from sandbox.inside.wire.frames import Frame, FrameReader, encode_frame
from sandbox.inside.wire.server_settings import ServerSettings
from sandbox.inside.zygote.zygote import Zygote

_CHUNK = 1 << 16  # libc would map and unmap a larger buffer for each read
_MAX_FORKS_PER_LOOP = 2
_KILLED = ["died", str(-signal.SIGKILL)]
_OOM_KILLED = ["failed", "the kernel killed a call below its memory limit"]


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
        self._warm = WarmProcesses(settings, zygote, self._process_tree, folder, cgroups)
        self._notebooks = NotebookProcesses(self._process_tree)
        self._usage = usage = ProcessUsage(self._process_tree, zygote.pid)
        self._exits = ExitClassifier(settings, isolation.own_namespaces, usage)
        self._monitor = CallMonitor(settings, usage, self._notebooks, self)

    def serve(self) -> None:
        """Until the executor closes its end."""
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
        """Kills all calls and their descendants; in a pid namespace the kernel does so."""
        if not self._own_namespaces:
            for child in set(self._processes_by_fd.values()):
                kill_groups(child.pid, child.worker)
            kill_orphans(self._process_tree, set())

    # ------------------------------------------------------------ calls

    def _read_executor(self) -> bool:
        chunk = self._executor.recv(_CHUNK)
        if not chunk:
            return False
        self._pending.extend(self._reader.feed(chunk))
        return True

    def _handle_pending(self) -> None:
        """Forks few processes per loop: exits and full pipes must not wait for many forks."""
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
                self._cancel(self._notebooks.get(frame["session"]))
            case "kill":
                self._cancel(self._processes_by_call.get(frame["id"]))
            case "ping":
                self._send({"id": frame["id"]})
            case "end_spares":
                for spare in self._warm.remove_spare_notebooks(frame["pause_s"]):
                    self.kill(spare)
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
            self._register(child, child.control.fileno())
        elif child.cgroup is not None:
            child.cgroup.begin_call()
        self._monitor.release(child)
        child.drop_output()
        self._start(child, call, CELL if self._monitor.has_room_for_checkpoint(child) else CELL_WITHOUT_CHECKPOINT)

    def _start(self, child: CallProcess, call: Frame, kind: int) -> None:
        nonce = int.from_bytes(os.urandom(8), "little")
        now = time.monotonic()
        child.assign_call(call, nonce, now, self._settings.time_limit_s)
        self._processes_by_call[call["id"]] = child
        child.unsent = encode_call(kind, call["cells"], call["seed"], nonce, call["code"], call["stdin"])
        if not child.send():
            fd = child.control.fileno()
            self._register(child, fd)  # no effect for a notebook: its socket is registered
            self._poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        self._monitor.on_call_started(child, now)

    def _cancel(self, child: CallProcess | None) -> None:
        if child is not None:
            self.kill(child)

    def stop(self, child: CallProcess) -> None:
        """Kills the call. A notebook rolls back to the state before it, if that is possible."""
        if child.notebook_id is None or child.rolling_back or not self._notebooks.kill_cell(child):
            self.kill(child)
        else:
            child.rolling_back = True

    def kill(self, child: CallProcess) -> None:
        """Kills the process and its descendants. Its exit triggers the answer."""
        self._notebooks.discard(child)
        child.killed = True
        os.kill(child.pid, signal.SIGKILL)
        if not self._own_namespaces:
            kill_groups(child.pid, child.worker)

    # ------------------------------------------------------------ events

    def _on_child(self, child: CallProcess, fd: int) -> None:
        if fd == child.pidfd:
            self._reap(child)
        elif fd == child.control.fileno():
            if child.unsent and child.send():
                self._poll.modify(fd, select.EPOLLIN)
            self.receive_reply(child)
        else:
            for stream in child.streams:
                if stream.fd == fd and not stream.drain():
                    self._unregister(fd)

    def receive_reply(self, child: CallProcess) -> bool:
        """Reads the process's reply. False if its call is over."""
        if not child.read_outcome(MAX_OUTCOME_BYTES):
            self._unregister(child.control.fileno())
            if child.notebook_id is not None or child.has_invalid_reply:
                child.outcome = child.outcome or self._exits.find_oom_kill(child)
                self.kill(child)
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
            self.kill(child)
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
        """Reads the process's pipes and socket from now on."""
        self._register(child, child.control.fileno())
        for stream in child.streams:
            self._register(child, stream.fd)

    # ------------------------------------------------------------ processes

    def _fork(self, *, as_notebook: bool = False) -> str | None:
        """Forks a process ahead of its call. The cause if that fails."""
        try:
            child = self._warm.fork(as_notebook=as_notebook)
        except ConnectionError:  # the zygote has ended
            raise
        except OSError as error:
            return f"no process for a call: {error.strerror}"
        self._register(child, child.pidfd)
        return None

    def _register(self, child: CallProcess, fd: int) -> None:
        if fd not in self._processes_by_fd:
            self._processes_by_fd[fd] = child
            self._poll.register(fd, select.EPOLLIN)

    def _unregister(self, fd: int) -> None:
        if self._processes_by_fd.pop(fd, None) is not None:
            self._poll.unregister(fd)


class ExitClassifier:
    """Finds what ended a call's process: its code, one of its limits, or a machine without resources."""

    def __init__(self, settings: ServerSettings, own_namespaces: bool, usage: ProcessUsage) -> None:
        self._settings = settings
        self._own_namespaces = own_namespaces
        self._usage = usage

    def classify(self, child: CallProcess, exit_code: int, cpu_s: float) -> CallOutcome:
        if exit_code == -signal.SIGKILL and not child.killed:
            if self._own_namespaces and cpu_s > self._settings.time_limit_s:
                return ["timeout"]
            if child.cgroup is None and self._was_oom_killed(child):
                return _OOM_KILLED
            if self._own_namespaces and child.cgroup is None:  # the kernel killed it: nothing else can kill process 1
                return ["memory"]
        if exit_code == FORK_FAILED_EXIT_CODE and child.notebook_id is not None:
            return ["failed", "a notebook could not fork"]
        if exit_code > 0 and not child.has_begun:
            return ["failed", "a call could not be isolated"]
        return ["died", str(exit_code)]

    def correct_for_oom_kill(self, child: CallProcess, outcome: CallOutcome) -> CallOutcome:
        """The outcome, unless the kernel killed a process of the call for lack of memory."""
        was_killed = outcome in (_KILLED, _OOM_KILLED)
        if not was_killed and not (child.cgroup and child.pipes_polled):  # too short to fill its cgroup
            return outcome
        found = self.find_oom_kill(child)
        if found == _OOM_KILLED and not was_killed:  # the call went on without one of its children
            return outcome
        return found or outcome

    def find_oom_kill(self, child: CallProcess) -> CallOutcome | None:
        """The outcome if the kernel, and not the fork server, killed a process of the call for lack of memory."""
        if child.exceeded_limit is not None or child.killed:
            return None
        if child.cgroup is None:
            return _OOM_KILLED if self._was_oom_killed(child) else None
        return {"call": ["memory"], "machine": _OOM_KILLED, None: None}[child.cgroup.find_culprit()]

    def _was_oom_killed(self, child: CallProcess) -> bool:
        """Whether a full machine or container killed a call below its memory limit."""
        return child.memory_bytes <= self._settings.memory_mib << 20 and self._usage.take_oom_kill()
