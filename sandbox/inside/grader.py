"""The grader: compares answers with math-verify in processes that never run the model's code.

`asterism.sandbox.pool.grader_client` starts the grader like a fork server, in the same namespaces. The grader
imports math-verify once and forks workers, each of which makes one comparison at a time. No comparison
waits for another one, and the grader's memory does not grow.

    executor -> grader   {"id", "answer", "truth"}
    grader -> executor   {"id", "correct", "duration_s"}, or {"id", "failed"} with a cause

A worker parses the truth first and reports it. If the worker crashes or exceeds its CPU time or memory
after this report, the answer is wrong; before the report, the grading is an infrastructure failure.
math-verify's own timeouts are off, because they use SIGALRM.

Bounds: `concurrent_gradings` workers with short comparisons. After `_SHORT_S` of CPU time a
comparison is a long one: its worker gets a low priority, and ends after this comparison. The
executor bounds the number of all requests.
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
from functools import cache
from typing import Any, NamedTuple, NoReturn

from asterism.sandbox.inside import exact_comparison
from asterism.sandbox.inside.isolation import namespaces, seccomp, syscalls
from asterism.sandbox.inside.wire.frames import Frame, FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import MAX_GRADE_WALL, ServerSettings, parse_settings

MIB = 1 << 20
_MATH_VERIFY_MIB = 1024  # address space of math-verify and sympy without data
_MAX_DATA_MIB = 128  # data of a comparison, beyond the grader's own memory
_SHORT_S = 0.03  # CPU time of a short comparison; most comparisons need less
_LOW_PRIORITY = 15  # nice value; a process with nice value 0 gets 28 times the CPU time
_MAX_REQUESTS = 200  # limit of requests per worker, because a worker's caches grow
_CHECK_S = 0.01  # interval of CPU time checks
_CONNECTION_FD = 3  # connection to the grader, in a worker
_TRUTH_PARSED, _TRUTH_UNREADABLE, _EQUAL, _NOT_EQUAL = b"P", b"U", b"E", b"N"
_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("x+1", "1+x"),
    ("(x-1)(x+1)", "x^2-1"),
    ("\\{1,2\\}", "\\{2,1\\}"),
    ("(1,2)", "(2,1)"),
    ("[1,3)", "1 \\le x < 3"),
    ("2\\sqrt{3}", "3\\pi"),
    ("\\sin(2x)", "e^{2}"),
    ("3+4i", "y=2x+3"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\text{none}"),
    ("1,2", "x>2"),
)


def main() -> NoReturn:
    """Serve until the executor closes the socket. Arguments: settings as JSON, socket descriptor."""
    settings = parse_settings(sys.argv[1])
    executor = socket.socket(fileno=int(sys.argv[2]))
    try:
        _isolate(settings, executor)
        logging.disable(logging.WARNING)  # math-verify warns that its timeouts are off
        for answer, truth in _WARM_UP:  # loads lazy imports, and fills the parser's caches
            compare_parsed(parse_math(answer), parse_math(truth))
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
        seccomp.install_server_filter(own_folders=False)
    memory = (settings.memory_mib + _MATH_VERIFY_MIB) * MIB
    limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))


def _limit_data(settings: ServerSettings) -> None:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    limit = own + min(settings.memory_mib, _MAX_DATA_MIB) * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class _Worker:
    """A forked process that makes one comparison at a time."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.request_id: int | None = None  # None: idle
        self.num_requests = 0
        self.started_at = 0.0
        self.cpu_before_s = 0.0
        self.is_short = True
        self.received = b""
        self.is_starved = False  # whether the worker was killed before it used its CPU time

    def send(self, frame: Frame) -> None:
        """Send a comparison. Raises OSError if the worker has exited."""
        self.request_id, self.received, self.started_at = frame["id"], b"", time.monotonic()
        self.num_requests += 1
        self.cpu_before_s = self._read_cpu_s()
        self.connection.sendall(encode_frame(frame))

    def measure_cpu_s(self) -> float:
        """Return the CPU time of the present comparison. Raises OSError if the worker has exited."""
        return self._read_cpu_s() - self.cpu_before_s

    def _read_cpu_s(self) -> float:
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
    """Waits in `poll` for the executor and for the workers."""

    def __init__(self, executor: socket.socket, settings: ServerSettings) -> None:
        self._executor = executor
        self._limit_s = settings.time_limit_s
        self._max_short = settings.concurrent_gradings
        self._reader = FrameReader()
        self._waiting: deque[Frame] = deque()  # bounded by the executor's requests in flight
        self._workers: dict[int, _Worker] = {}  # workers by the descriptor of their connection
        self._poll = select.poll()
        self._poll.register(executor, select.POLLIN)

    def serve(self) -> None:
        """Serve the executor until it closes its end."""
        while True:
            is_busy = any(worker.request_id is not None for worker in self._workers.values())
            for fd, _ in self._poll.poll(_CHECK_S * 1000 if is_busy else None):
                if fd != self._executor.fileno():
                    self._read_report(self._workers[fd])
                elif not self._read_requests():
                    return
            for worker in self._workers.values():
                if worker.request_id is not None:
                    self._check_limits(worker)
            while self._waiting and (worker := self._find_worker(self._waiting[0])) is not None:
                with contextlib.suppress(OSError):  # a worker that has exited is reported by its socket
                    worker.send(self._waiting.popleft())

    def _read_requests(self) -> bool:
        chunk = self._executor.recv(1 << 18)
        self._waiting.extend(self._reader.feed(chunk))
        return bool(chunk)

    def _find_worker(self, frame: Frame) -> _Worker | None:
        """Return an idle worker or a new one, or None if all are busy, or after a failed fork."""
        short = [worker for worker in self._workers.values() if worker.is_short]
        if (idle := next((worker for worker in short if worker.request_id is None), None)) is not None:
            return idle
        if len(short) >= self._max_short:
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = os.fork()
            except OSError as error:
                ours.close()
                self._waiting.popleft()
                self._send({"id": frame["id"], "failed": f"the grader cannot fork: {error.strerror}"})
                return None
            if pid == 0:
                _run_worker(theirs)
        worker = self._workers[ours.fileno()] = _Worker(pid, ours)
        self._poll.register(ours, select.POLLIN)
        return worker

    def _read_report(self, worker: _Worker) -> None:
        try:
            chunk = worker.connection.recv(16)
        except ConnectionError:
            chunk = b""
        worker.received += chunk
        is_complete = worker.received[-1:] in (_TRUTH_UNREADABLE, _EQUAL, _NOT_EQUAL)
        if chunk and not is_complete:
            return
        if worker.request_id is not None:
            self._send(worker.make_answer())
            worker.request_id = None
        if not chunk or not worker.is_short or worker.num_requests >= _MAX_REQUESTS:
            self._end(worker)

    def _end(self, worker: _Worker) -> None:
        self._poll.unregister(worker.connection)
        del self._workers[worker.connection.fileno()]
        worker.connection.close()
        os.kill(worker.pid, signal.SIGKILL)  # not reaped yet, so the pid is the worker's
        os.waitpid(worker.pid, 0)

    def _check_limits(self, worker: _Worker) -> None:
        try:
            cpu_s = worker.measure_cpu_s()
        except OSError:  # the worker has exited
            return
        if worker.is_short and cpu_s > _SHORT_S:
            worker.is_short = False
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, worker.pid, _LOW_PRIORITY)
        is_late = time.monotonic() - worker.started_at > MAX_GRADE_WALL * self._limit_s
        worker.is_starved = is_late and worker.is_short  # a long comparison makes the answer wrong
        if is_late or cpu_s > self._limit_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def _send(self, frame: Frame) -> None:
        self._executor.sendall(encode_frame(frame))


def _run_worker(connection: socket.socket) -> NoReturn:
    """Run the forked process until the grader kills it, or until memory is short."""
    try:
        os.dup2(connection.fileno(), _CONNECTION_FD)
        syscalls.close_all_from(_CONNECTION_FD + 1)
        syscalls.die_with_parent(signal.SIGKILL)
        reader = FrameReader()
        while chunk := os.read(_CONNECTION_FD, 1 << 18):
            for frame in reader.feed(chunk):
                theirs = parse_math(frame["truth"])
                os.write(_CONNECTION_FD, _TRUTH_PARSED if theirs else _TRUTH_UNREADABLE)
                if theirs:
                    is_equal = compare_parsed(parse_math(frame["answer"]), theirs)
                    os.write(_CONNECTION_FD, _EQUAL if is_equal else _NOT_EQUAL)
    finally:
        os._exit(0)


def compare_parsed(mine: list[Any], theirs: list[Any]) -> bool:
    """Return whether a reading of the answer equals a reading of the truth. Raises MemoryError."""
    math_verify = _load_math_verify().module
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
    """Return all readings of `text`, or nothing if math-verify cannot parse it. Raises MemoryError."""
    loaded = _load_math_verify()
    try:
        return loaded.module.parse(f"${text}$", [loaded.extraction], parsing_timeout=None, raise_on_error=True)
    except MemoryError:
        raise
    except Exception:
        return []


class _MathVerify(NamedTuple):
    module: Any
    extraction: Any  # reads the whole text as LaTeX; extracts no number or box from it and drops no unit


@cache
def _load_math_verify() -> _MathVerify:
    module: Any = importlib.import_module("math_verify")
    latex: Any = importlib.import_module("latex2sympy2_extended")
    exact_comparison.install()
    normalization = latex.NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    extraction = module.LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
    return _MathVerify(module, extraction)
