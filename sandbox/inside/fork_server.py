"""The fork server: one thread that forks an isolated process for each call and watches over it.

Standard library only; `sandbox.inside.boot` starts it.

    executor -> fork server   {"op": "run" | "cell", "id", "code", "stdin", "seed", "session", "cells"}
                              {"op": "end", "session"}     {"op": "kill", "id"}     {"op": "ping", "id"}
    fork server -> executor   {"hello": ...} or {"refused": cause}, once
                              {"id", "kind", "details", "stdout", "stderr", "stdout_cut", "stderr_cut", "duration_s", "cells"}
                              {"id"}, to a ping

"kind" and "details" are the outcome's (sandbox.inside.program), or "timeout", "died" (exit code), "lost": the session's
state does not hold the `cells` that the call said, and the cell did not run. `cells` of an answer is how many it holds
now. What the code writes can never become a frame: it reaches this process by pipes, as bytes to be quoted.

A session's processes are its own until "end". A cell that dies or exceeds its time takes with it all that it has started,
and the session goes on from the state before (`session_process`); if it does not come back, the session ends, which the
number of cells says. The executor bounds how many calls and sessions there are.
"""
# pathlib would be mapped into every forked process.
# ruff: noqa: PTH102

import os
import select
import signal
import socket
import time
from collections import deque

from sandbox.inside.calls import Outcome, call_bytes
from sandbox.inside.cell_process import Isolating
from sandbox.inside.children import Captured, Child
from sandbox.inside.folders import remove_folder
from sandbox.inside.frames import Frame, FrameReader, encode
from sandbox.inside.orphans import end_groups, end_orphans
from sandbox.inside.process_tree import ProcessTree
from sandbox.inside.settings import Settings
from sandbox.inside.template import Template
from sandbox.inside.usage import Usage
from sandbox.inside.watching import OUTCOME_BYTES, Watch

_CHUNK = 1 << 16  # libc would map and unmap a larger one each time
_PROCESSES_A_TURN = 2
# Users that no system hands out, one for each call where root has no namespaces; so many for each fork server.
_FIRST_FREE_ID, _IDS, _SERVERS = 2_000_000_000, 1_024, 2_000_000


class ForkServer:
    """Consumes the executor's frames, produces one answer for each call; waits in `epoll` for both and for timers."""

    def __init__(
        self, settings: Settings, executor: socket.socket, how: Isolating, template: Template, folder: str | None
    ) -> None:
        self._settings = settings
        self._how = how
        self._template = template
        self._processes = ProcessTree(how.proc)
        self._folder = folder
        self._executor = executor
        self._reader = FrameReader()
        self._poll = select.epoll()
        self._poll.register(executor, select.EPOLLIN)
        self._todo: deque[Frame] = deque()  # what the executor has asked for, in its order
        self._warm: deque[Child] = deque()
        self._by_fd: dict[int, Child] = {}
        self._by_call: dict[int, Child] = {}
        self._sessions: dict[int, Child] = {}
        self._calls_forked = 0
        first_id = _FIRST_FREE_ID + os.getpid() % _SERVERS * _IDS
        self._free_ids = deque(range(first_id, first_id + _IDS))
        self._watch = Watch(settings, Usage(self._processes, template.pid), self)

    def serve(self) -> None:
        """Until the executor closes its end."""
        while True:
            idle = len(self._warm) < self._settings.warm_processes
            events = self._poll.poll(0 if idle or self._todo else self._watch.until_next())
            if not events and idle and not self._todo:
                self._warm.append(self._fork())
            for fd, _ in events:
                if fd == self._executor.fileno():
                    if not self._read_executor():
                        return
                elif (child := self._by_fd.get(fd)) is not None:
                    self._on_child(child, fd)
            self._handle_some()
            self._watch.run()

    def end_all(self) -> None:
        """Nothing that was started is left; in a pid namespace the kernel sees to it when this process ends."""
        if not self._how.own_namespaces:
            for child in set(self._by_fd.values()):
                end_groups(child.pid, child.worker)
            end_orphans(set())

    # ------------------------------------------------------------ calls

    def _read_executor(self) -> bool:
        chunk = self._executor.recv(_CHUNK)
        if not chunk:
            return False
        self._todo.extend(self._reader.feed(chunk))
        return True

    def _handle_some(self) -> None:
        """Few new processes a turn: those that have ended, or wait for room in their pipes, do not wait for many forks."""
        processes = 0
        while self._todo and processes < _PROCESSES_A_TURN:
            if self._needs_process():
                processes += 1
                if not self._warm:
                    self._warm.append(self._fork())
            self._handle(self._todo.popleft())

    def _needs_process(self) -> bool:
        frame = self._todo[0]
        if frame["op"] == "cell":
            return not frame["cells"] and frame["session"] not in self._sessions
        return frame["op"] == "run"

    def _handle(self, frame: Frame) -> None:
        match frame["op"]:
            case "run":
                self._start(self._warm.popleft(), frame)
            case "cell":
                self._start_cell(frame)
            case "end":
                self._end_session(frame["session"])
            case "kill":
                self._cancel(self._by_call.get(frame["id"]))
            case "ping":
                self._send({"id": frame["id"]})
            case _:
                raise ValueError(f"unknown op {frame['op']}")

    def _start_cell(self, call: Frame) -> None:
        child = self._sessions.get(call["session"])
        if child is None and call["cells"]:
            self._send({"id": call["id"], "kind": "lost", "cells": 0})
            return
        if child is None:
            child = self._warm.popleft()
            child.session = call["session"]
            self._sessions[call["session"]] = child
            self._register(child, child.control.fileno())
        for stream in child.streams:  # what a thread wrote between two cells belongs to neither
            stream.drain()
            stream.take()
        self._start(child, call)

    def _start(self, child: Child, call: Frame) -> None:
        nonce = int.from_bytes(os.urandom(8), "little")
        now = time.monotonic()
        child.begin(call, nonce, now, self._settings.time_limit_s)
        self._by_call[call["id"]] = child
        is_cell, cells = call["op"] == "cell", call["cells"]
        child.unsent = call_bytes(is_cell, cells, call["seed"], nonce, call["code"], call["stdin"])
        if not child.send():
            fd = child.control.fileno()
            self._register(child, fd)  # a session's is already
            self._poll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
        self._watch.began(child, now)

    def _end_session(self, session: int) -> None:
        child = self._sessions.pop(session, None)
        if child is not None:
            self._cancel(child)

    def _cancel(self, child: Child | None) -> None:
        if child is not None:
            child.cancelled = True
            self._kill(child)

    def stop(self, child: Child) -> None:
        """Ends the call. A session goes on from the state before it, if it can say so in time."""
        if child.session is None or child.ending or not self._end_cell(child):
            self._kill(child)
        else:
            child.ending = True

    def _end_cell(self, child: Child) -> bool:
        """Ends what the cell has started, and nothing else of its session. False if that cannot be done."""
        return child.started is not None and self._processes.end_cell(child.pid, child.started)

    def _kill(self, child: Child) -> None:
        """Ends the process, and in a pid namespace all that it started. The answer goes out when it has ended."""
        self._sessions.pop(child.session, None) if child.session is not None else None
        child.killed = True
        os.kill(child.pid, signal.SIGKILL)
        if not self._how.own_namespaces:
            end_groups(child.pid, child.worker)

    # ------------------------------------------------------------ events

    def _on_child(self, child: Child, fd: int) -> None:
        if fd == child.pidfd:
            self._reap(child)
        elif fd == child.control.fileno():
            if child.unsent and child.send():
                self._poll.modify(fd, select.EPOLLIN)
            self.hear(child)
        else:
            for stream in child.streams:
                if stream.fd == fd and not stream.drain():
                    self._forget(fd)

    def hear(self, child: Child) -> bool:
        """Takes what the process has said. False if nothing more is to come of its call."""
        if not child.read_outcome(OUTCOME_BYTES):
            self._forget(child.control.fileno())
            self._kill(child)
            return False
        if child.call and child.outcome and child.session is not None:
            self._finish_cell(child)
            return False
        return True

    def _finish_cell(self, child: Child) -> None:
        assert child.outcome is not None
        if child.outcome[0] == "died" and not self._end_cell(child):
            self._kill(child)
            return
        for stream in child.streams:
            stream.drain()
        if child.watched:
            child.watched = False
            for stream in child.streams:
                self._forget(stream.fd)
        self._answer(child, self._ending(child, child.outcome))

    def _reap(self, child: Child) -> None:
        _, status, taken = os.wait4(child.pid, 0)
        for fd in child.fds:
            self._forget(fd)
        if not self._how.own_namespaces:
            self._end_orphans()
        if child in self._warm:
            self._warm.remove(child)
        if child.session is not None and self._sessions.get(child.session) is child:
            del self._sessions[child.session]
        if child.call is not None:
            for stream in child.streams:
                stream.drain()
            child.read_outcome(OUTCOME_BYTES)
            child.cells = 0
            cpu_s = taken.ru_utime + taken.ru_stime
            end = child.outcome or self._end_of_process(child, os.waitstatus_to_exitcode(status), cpu_s)
            self._answer(child, self._ending(child, end))
        child.close()
        if child.folder is not None:
            remove_folder(child.folder)
        if child.user is not None and child.user not in self._free_ids:
            self._free_ids.appendleft(child.user)  # so that the shared one stays the last

    def _end_of_process(self, child: Child, exit_code: int, cpu_s: float) -> Outcome:
        if exit_code == -signal.SIGKILL and self._how.own_namespaces and not child.killed:
            # Nobody inside can kill a first process. The kernel did: its processor time was up, or memory was short.
            return ["timeout" if cpu_s > self._settings.time_limit_s else "memory"]
        return ["died", str(exit_code)]

    def _ending(self, child: Child, outcome: Outcome) -> Outcome:
        if outcome[0] == "exit":
            return ["died", outcome[1]]
        if outcome[0] == "died" and child.over is not None:
            return [child.over]
        if outcome[0] == "died" and outcome[1] == str(-signal.SIGXCPU):
            return ["timeout"]
        return outcome

    def _answer(self, child: Child, outcome: list[str]) -> None:
        assert child.call is not None
        now = time.monotonic()
        child.note_start(now)
        stdout, stdout_cut = child.streams[0].take()
        stderr, stderr_cut = child.streams[1].take()
        self._by_call.pop(child.call["id"], None)
        self._watch.ended(child)
        answer = {
            "id": child.call["id"],
            "kind": outcome[0],
            "details": outcome[1:],
            "stdout": stdout,
            "stderr": stderr,
            "stdout_cut": stdout_cut,
            "stderr_cut": stderr_cut,
            "duration_s": now - child.began_at,
            "cells": child.cells,
        }
        child.forget_call()
        self._send(answer)

    def _send(self, frame: Frame) -> None:
        self._executor.sendall(encode(frame))

    def follow(self, child: Child) -> None:
        """Reads its pipes from now on."""
        for stream in child.streams:
            self._register(child, stream.fd)

    def worker(self, child: Child) -> int | None:
        """Who runs the call. None while a session has not said it, or when it has ended."""
        if child.session is None:
            return child.pid
        return None if child.started is None else self._processes.find(child.pid, child.started.worker)

    def checkpoint(self, child: Child) -> int | None:
        """Who keeps a session's state from before the call. None if that is its first process."""
        if child.started is None or not child.started.checkpoint:
            return None
        return self._processes.find(child.pid, child.started.checkpoint)

    # ------------------------------------------------------------ processes

    def _register(self, child: Child, fd: int) -> None:
        if fd not in self._by_fd:
            self._by_fd[fd] = child
            self._poll.register(fd, select.EPOLLIN)

    def _forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _fork(self) -> Child:
        """A process that isolates itself and then waits for a call."""
        ours, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._calls_forked += 1
        folder, user = self._place()
        pid = self._template.copy((theirs.fileno(), out_write, err_write), user, folder)
        theirs.close()
        os.close(out_write)
        os.close(err_write)
        ours.setblocking(False)
        os.set_blocking(out_read, False)
        os.set_blocking(err_read, False)
        limit = self._settings.output_bytes
        self._processes.offer_to_the_kernel_first(pid)
        child = Child(pid, ours, Captured(out_read, limit), Captured(err_read, limit), folder)
        child.user = user
        self._register(child, child.pidfd)
        return child

    def _place(self) -> tuple[str | None, int | None]:
        """(folder, user) of the next call, where it cannot mount a folder and make a namespace of its own."""
        if self._folder is None:
            return None, None
        folder = f"{self._folder}/{self._calls_forked}"
        os.mkdir(folder, 0o700)
        if os.getuid() != 0:
            return folder, None
        user = self._free_ids.popleft() if len(self._free_ids) > 1 else self._free_ids[0]  # the last is many calls'
        os.chown(folder, user, user)
        return folder, user

    def _end_orphans(self) -> None:
        """Without pid namespaces: what a call's process left running has become this process's child."""
        end_orphans({self._template.pid, *(child.pid for child in self._by_fd.values())})
