"""Grades answers: plain numbers and equal strings in this process, others in the grader's.

Requests to the grader are pipelined, each with a time limit of `grade_limit_s`. A request that
hangs or crashes the grader raises SandboxFailure; the requests after it are sent to a new grader.
"""

import asyncio
import re
import time
from collections import deque

from sandbox.contract import Grade, SandboxFailure
from sandbox.hosts.host import Host
from sandbox.inside.wire.frames import Frame
from sandbox.inside.wire.server_settings import ServerSettings
from sandbox.pool.server_connection import ServerConnection

MAX_QUEUED_GRADINGS = 65_536  # beyond it grade() raises SandboxFailure
_MAX_IN_FLIGHT = 16  # requests in the grader's socket, so that it never waits for the executor
_MAX_MATH_CHARACTERS = 4096  # longer answers are compared as strings only
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?", re.ASCII)
_MODULE = "sandbox.inside.grader"
_CLOSING_ERROR = "the sandbox is closing"


def compare_plain(answer: str, truth: str) -> bool | None:
    """The verdict for two numbers, equal strings or a very long answer; None: needs math-verify."""
    answer_number, truth_number = _parse_number(answer), _parse_number(truth)
    if answer_number is not None and truth_number is not None:
        return answer_number == truth_number
    if _normalize(answer) == _normalize(truth):
        return True
    return False if len(answer) > _MAX_MATH_CHARACTERS else None


def _parse_number(text: str) -> tuple[bool, str, str] | None:
    """(is negative, integer digits, fraction digits), without insignificant zeros."""
    match = _NUMBER.fullmatch(text.strip().strip("$").strip())
    if match is None or not (match[2] or match[3]):
        return None
    whole, fraction = match[2].lstrip("0"), (match[3] or "").rstrip("0")
    return match[1] == "-" and bool(whole or fraction), whole, fraction


def _normalize(text: str) -> str:
    return "".join(text.strip().strip("$").split())


class _GradeRequest:
    def __init__(self, number: int, answer: str, truth: str) -> None:
        self.frame: Frame = {"id": number, "answer": answer, "truth": truth}
        self.verdict: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()


class GraderClient:
    """Starts the grader's process when an answer needs it, also after a death of the process."""

    def __init__(self, host: Host, settings: ServerSettings) -> None:
        self._host = host
        self._settings = settings
        self._connection: ServerConnection | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._waiting: deque[_GradeRequest] = deque()
        self._in_flight: deque[_GradeRequest] = deque()  # in the order of their answers
        self._started_at = 0.0  # when the grader began the first of `_in_flight`
        self._deadline: asyncio.TimerHandle | None = None
        self._num_requests = 0
        self._stop_tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def pid(self) -> int | None:
        return self._connection.pid if self._connection is not None else None

    async def grade(self, answer: str, truth: str) -> Grade:
        started_at = time.monotonic()
        verdict = compare_plain(answer, truth)
        if verdict is not None:
            return Grade(verdict, time.monotonic() - started_at)
        if self._closing:
            raise SandboxFailure(_CLOSING_ERROR)
        if len(self._waiting) >= MAX_QUEUED_GRADINGS:
            raise SandboxFailure("the sandbox's queue of gradings is full")
        self._num_requests += 1
        request = _GradeRequest(self._num_requests, answer, truth)
        self._waiting.append(request)
        self._send_waiting()
        return await request.verdict

    async def close(self) -> None:
        self._closing = True
        if self._start_task is not None:
            self._start_task.cancel()
            await asyncio.gather(self._start_task, return_exceptions=True)
        connection, self._connection = self._connection, None
        self._cancel_deadline()
        self._fail_all(_CLOSING_ERROR)
        if connection is not None:
            await connection.stop()
        await asyncio.gather(*self._stop_tasks)

    def _send_waiting(self) -> None:
        """Sends requests up to `_MAX_IN_FLIGHT`; starts the grader if it does not run."""
        if self._connection is None:
            if self._start_task is None and self._waiting:
                self._start_task = asyncio.get_running_loop().create_task(self._start())
            return
        while self._waiting and len(self._in_flight) < _MAX_IN_FLIGHT:
            request = self._waiting.popleft()
            if request.verdict.done():
                continue  # cancelled
            if not self._in_flight:
                self._start_deadline()
            self._in_flight.append(request)
            self._connection.send(request.frame)

    async def _start(self) -> None:
        def on_frame(frame: Frame) -> None:
            self._on_frame(connection, frame)

        connection = ServerConnection(self._host, _MODULE, on_frame, lambda: self._on_end(connection))
        try:
            await connection.start(self._settings)
        except (SandboxFailure, OSError) as error:
            self._start_task = None
            self._fail_all(f"the grader cannot start: {error}")
            return
        self._start_task = None
        self._connection = connection
        self._send_waiting()

    def _on_frame(self, connection: ServerConnection, frame: Frame) -> None:
        if connection is not self._connection:
            return  # a late answer of a discarded grader
        request = self._in_flight.popleft()
        assert request.frame["id"] == frame["id"]
        if not request.verdict.done() and frame["correct"] is None:
            request.verdict.set_exception(SandboxFailure("the ground truth cannot be read"))
        elif not request.verdict.done():
            request.verdict.set_result(Grade(frame["correct"], time.monotonic() - self._started_at))
        self._cancel_deadline()
        if self._in_flight:
            self._start_deadline()
        self._send_waiting()

    def _on_end(self, connection: ServerConnection) -> None:
        if connection is self._connection:
            self._discard_connection("grader died")

    def _on_deadline(self) -> None:
        if self._connection is not None:
            self._connection.kill()
            self._discard_connection("grader timed out")

    def _discard_connection(self, cause: str) -> None:
        """Fails the request that the grader was working on, and sends the others to a new grader."""
        assert self._connection is not None
        task = asyncio.get_running_loop().create_task(self._connection.stop())
        self._connection = None
        self._cancel_deadline()
        self._stop_tasks.add(task)
        task.add_done_callback(self._stop_tasks.discard)
        if self._in_flight:
            failed = self._in_flight.popleft()
            if not failed.verdict.done():
                failed.verdict.set_exception(SandboxFailure(cause))
        self._waiting.extendleft(reversed(self._in_flight))
        self._in_flight.clear()
        self._send_waiting()

    def _start_deadline(self) -> None:
        self._started_at = time.monotonic()
        self._deadline = asyncio.get_running_loop().call_later(self._settings.time_limit_s, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _fail_all(self, cause: str) -> None:
        for request in (*self._in_flight, *self._waiting):
            if not request.verdict.done():
                request.verdict.set_exception(SandboxFailure(cause))
        self._in_flight.clear()
        self._waiting.clear()
