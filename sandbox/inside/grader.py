"""The grader: compares answers with math-verify in processes that never run the model's code.

`sandbox.pool.grader_client` starts it like a fork server, in the same namespaces. It imports
math-verify once and forks a process for each comparison, several at a time, so that no comparison
waits for another one, and the grader's memory does not grow.

    executor -> grader   {"id", "answer", "truth"}
    grader -> executor   {"id", "correct", "duration_s"}, or {"id", "failed"} with a cause

A forked process parses the truth first and reports it through its pipe. After that report the
answer is responsible: it is wrong if the comparison exceeds its CPU time or memory, or crashes.
Before that report the same is an infrastructure failure. math-verify's own timeouts are off,
because they use SIGALRM.

Bounds: `concurrent_gradings` processes that have used less than `_SHORT_S` of CPU time. Others run
only on CPUs that are idle otherwise. The executor bounds the number of all requests.
"""

import contextlib
import gc
import importlib
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, NoReturn

from sandbox.inside.isolation import namespaces, seccomp, syscalls
from sandbox.inside.wire.frames import Frame, FrameReader, encode_frame
from sandbox.inside.wire.server_settings import MAX_GRADE_WALL, ServerSettings, parse_settings

MIB = 1 << 20
_MATH_VERIFY_MIB = 1024  # address space of math-verify and sympy without data
_MAX_DATA_MIB = 128  # of a comparison, beyond the grader's own
_SHORT_S = 0.03  # CPU time; most comparisons need less
_CHECK_S = 0.01  # interval of CPU time checks
_REPORT_FD = 3  # in a forked process
_TRUTH_PARSED, _TRUTH_UNREADABLE, _EQUAL, _NOT_EQUAL = b"P", b"U", b"E", b"N"


def main() -> NoReturn:
    """Arguments: settings as JSON, socket descriptor. Exits when the executor closes the socket."""
    settings = parse_settings(sys.argv[1])
    executor = socket.socket(fileno=int(sys.argv[2]))
    try:
        _isolate(settings, executor)
        logging.disable(logging.WARNING)  # math-verify warns that its timeouts are off
        compare_parsed(parse_math("\\frac{1}{2}"), parse_math("0.5"))  # loads lazy imports
        _limit_data(settings)
        gc.collect()
        gc.freeze()  # a garbage collection in a forked process would copy the grader's pages
    except (OSError, ImportError) as error:
        executor.sendall(encode_frame({"refused": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    executor.sendall(encode_frame({"hello": settings.preload}))
    with contextlib.suppress(ConnectionError):
        _Grader(executor, settings).serve()
    os._exit(0)


def _isolate(settings: ServerSettings, executor: socket.socket) -> None:
    sys.path[:] = list(settings.import_folders)
    if settings.namespaces:
        namespaces.enter_namespaces([*settings.import_folders, sys.base_prefix], [executor.fileno()])
    else:
        syscalls.die_with_parent(signal.SIGKILL)
    syscalls.set_no_new_privileges()
    with contextlib.suppress(OSError, KeyError):  # the fork servers report a missing filter
        seccomp.build_server_filter().install()
    memory = (settings.memory_mib + _MATH_VERIFY_MIB) * MIB
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _limit_data(settings: ServerSettings) -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    limit = own + min(settings.memory_mib, _MAX_DATA_MIB) * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Comparison:
    """A forked process, and the read end of its pipe."""

    def __init__(self, request_id: int, pid: int, report: int) -> None:
        self.request_id = request_id
        self.pid = pid
        self.report = report
        self.started_at = time.monotonic()
        self.is_short = True
        self.received = b""
        self.is_starved = False  # killed although it had not used its CPU time

    def read_cpu_s(self) -> float:
        return time.clock_gettime(~self.pid << 3 | 2)  # the process's CPU clock, from clock_getcpuclockid

    def make_answer(self) -> Frame:
        if self.is_starved:
            cause = "the grader gets too little CPU time"
        elif self.received[:1] == _TRUTH_PARSED:
            duration_s = time.monotonic() - self.started_at
            return {"id": self.request_id, "correct": self.received[1:] == _EQUAL, "duration_s": duration_s}
        elif self.received == _TRUTH_UNREADABLE:
            cause = "the ground truth cannot be read"
        else:
            cause = "the ground truth exceeds the grader's limits"
        return {"id": self.request_id, "failed": cause}


class _Grader:
    """Waits in `poll` for the executor and for the forked processes."""

    def __init__(self, executor: socket.socket, settings: ServerSettings) -> None:
        self._executor = executor
        self._limit_s = settings.time_limit_s
        self._max_processes = settings.concurrent_gradings
        self._reader = FrameReader()
        self._waiting: deque[Frame] = deque()  # bounded by the executor's requests in flight
        self._comparisons: dict[int, _Comparison] = {}  # by the descriptor of the pipe
        self._poll = select.poll()
        self._poll.register(executor, select.POLLIN)

    def serve(self) -> None:
        """Until the executor closes its end."""
        while True:
            for fd, _ in self._poll.poll(_CHECK_S * 1000 if self._comparisons else None):
                if fd != self._executor.fileno():
                    self._read_report(self._comparisons[fd])
                elif not self._read_requests():
                    return
            for comparison in self._comparisons.values():
                self._check_limits(comparison)
            while self._waiting and self._count_short() < self._max_processes:
                self._start(self._waiting.popleft())

    def _count_short(self) -> int:
        return sum(comparison.is_short for comparison in self._comparisons.values())

    def _read_requests(self) -> bool:
        chunk = self._executor.recv(1 << 18)
        self._waiting.extend(self._reader.feed(chunk))
        return bool(chunk)

    def _start(self, frame: Frame) -> None:
        report, report_end = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(report)
            self._send({"id": frame["id"], "failed": f"the grader cannot fork: {error.strerror}"})
            return
        else:
            if pid == 0:
                _run_comparison(frame, report_end)
        finally:
            os.close(report_end)
        self._comparisons[report] = _Comparison(frame["id"], pid, report)
        self._poll.register(report, select.POLLIN)

    def _read_report(self, comparison: _Comparison) -> None:
        chunk = os.read(comparison.report, 16)
        comparison.received += chunk
        if chunk:
            return
        self._poll.unregister(comparison.report)
        del self._comparisons[comparison.report]
        os.close(comparison.report)
        os.waitpid(comparison.pid, 0)  # the process has closed its pipe, so it exits now
        self._send(comparison.make_answer())

    def _check_limits(self, comparison: _Comparison) -> None:
        try:
            cpu_s = comparison.read_cpu_s()
        except OSError:  # it has exited
            return
        comparison.is_starved = time.monotonic() - comparison.started_at > MAX_GRADE_WALL * self._limit_s
        if comparison.is_starved or cpu_s > self._limit_s:
            os.kill(comparison.pid, signal.SIGKILL)
        elif cpu_s > _SHORT_S and comparison.is_short:
            comparison.is_short = False
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(comparison.pid, os.SCHED_IDLE, os.sched_param(0))

    def _send(self, frame: Frame) -> None:
        self._executor.sendall(encode_frame(frame))


def _run_comparison(frame: Frame, report: int) -> NoReturn:
    """The forked process."""
    try:
        os.dup2(report, _REPORT_FD)
        syscalls.close_all_from(_REPORT_FD + 1)
        syscalls.die_with_parent(signal.SIGKILL)
        theirs = parse_math(frame["truth"])
        os.write(_REPORT_FD, _TRUTH_PARSED if theirs else _TRUTH_UNREADABLE)
        if theirs:
            mine = parse_math(frame["answer"])
            os.write(_REPORT_FD, _EQUAL if compare_parsed(mine, theirs) else _NOT_EQUAL)
    except MemoryError:
        pass
    finally:
        os._exit(0)


def compare_parsed(mine: list[Any], theirs: list[Any]) -> bool:
    """Whether one of the readings of the answer is equal to one of the truth. Raises MemoryError."""
    math_verify: Any = importlib.import_module("math_verify")
    for gold in theirs:
        for candidate in mine:
            try:
                if math_verify.verify(
                    gold, candidate, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True
                ):
                    return True
            except MemoryError:
                raise
            except Exception:
                continue
    return False


def parse_math(text: str) -> list[Any]:
    """All readings of `text`; empty if math-verify cannot parse it. Raises MemoryError."""
    math_verify: Any = importlib.import_module("math_verify")
    try:
        return math_verify.parse(f"${text}$", parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []
