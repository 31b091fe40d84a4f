"""Grades answers: easy ones here, without math-verify (asterism.sandbox.pool.answer_checks), others in the grader.

The grader (sandbox/inside/grader.py) makes several comparisons at a time and limits each of them. If
it exits or sends no frame for too long, its requests are sent to a new grader, once; after the
failure of a second grader, the request raises SandboxFailure.
"""

import asyncio
import time
from collections import deque

import structlog

from asterism.bus.process.waiting import cancel_tasks, start_task
from asterism.sandbox.contract import Grade, SandboxFailure
from asterism.sandbox.grading.rewriting import rewrite
from asterism.sandbox.hosts.host import Host
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.inside.wire.server_settings import MAX_GRADE_WALL, ServerSettings
from asterism.sandbox.pool.answer_checks import Acceptance, judge_answer, list_compared_texts
from asterism.sandbox.pool.server_connection import ServerConnection

MAX_QUEUED_GRADINGS = 65_536  # bound beyond which grade() raises SandboxFailure
_IN_FLIGHT_FACTOR = 16  # requests in the grader per concurrent grading: long ones must not delay the others
_MAX_ATTEMPTS = 2  # limit of graders to which a request is sent
_HANG_S = 1.0  # a grader without an answer for its wall time limit plus this time is replaced
_MODULE = "asterism.sandbox.inside.grader"
_CLOSING_ERROR = "the sandbox is closing"


class _GradeRequest:
    def __init__(self, number: int, answer: str, truth: str) -> None:
        self.frame: Frame = {"id": number, "answer": answer, "truth": truth}
        self.verdict: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        self.num_attempts = 0

    def fail(self, cause: str) -> None:
        if not self.verdict.done():
            self.verdict.set_exception(SandboxFailure(cause))


class GraderClient:
    """A client that starts the grader's process when an answer needs it, again if the process has ended."""

    def __init__(self, host: Host, settings: ServerSettings, accept: Acceptance = "number") -> None:
        self._host = host
        self._accept: Acceptance = accept
        self._settings = settings
        self._connection: ServerConnection | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._waiting: deque[_GradeRequest] = deque()
        self._in_flight: dict[int, _GradeRequest] = {}  # requests by number
        self._deadline: asyncio.TimerHandle | None = None
        self._num_requests = 0
        self._stop_tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def pid(self) -> int | None:
        return self._connection.pid if self._connection is not None else None

    async def grade(self, answer: str, truth: str) -> Grade:
        started_at = time.monotonic()
        verdict = judge_answer(answer, truth, self._accept)
        if verdict is not None:
            return Grade(verdict, time.monotonic() - started_at)
        if self._closing:
            raise SandboxFailure(_CLOSING_ERROR)
        if len(self._waiting) >= MAX_QUEUED_GRADINGS:
            raise SandboxFailure("the sandbox's queue of gradings is full")
        requests = [self._enqueue(text, truth) for text in list_compared_texts(answer, truth)]
        self._send_waiting()
        grades = await asyncio.gather(*(request.verdict for request in requests))
        return Grade(all(grade.correct for grade in grades), sum(grade.duration_s for grade in grades))

    def _enqueue(self, answer: str, truth: str) -> _GradeRequest:
        self._num_requests += 1
        request = _GradeRequest(self._num_requests, rewrite(answer).text, rewrite(truth).text)
        self._waiting.append(request)
        return request

    async def close(self) -> None:
        self._closing = True
        await cancel_tasks(self._start_task)
        connection, self._connection = self._connection, None
        self._cancel_deadline()
        self._fail_all(_CLOSING_ERROR)
        if connection is not None:
            await connection.stop()
        await asyncio.gather(*self._stop_tasks)

    def _send_waiting(self) -> None:
        """Send as many requests as may be in flight; start the grader if it does not run."""
        if self._connection is None:
            if self._start_task is None and self._waiting:
                self._start_task = asyncio.get_running_loop().create_task(self._start())
            return
        while self._waiting and len(self._in_flight) < _IN_FLIGHT_FACTOR * self._settings.concurrent_gradings:
            request = self._waiting.popleft()
            if request.verdict.done():
                continue  # cancelled
            request.num_attempts += 1
            self._in_flight[request.frame["id"]] = request
            self._connection.send(request.frame)
        if self._in_flight and self._deadline is None:
            self._start_deadline()

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
        request = self._in_flight.pop(frame["id"])
        if "failed" in frame:
            request.fail(frame["failed"])
        elif not request.verdict.done():
            request.verdict.set_result(Grade(frame["correct"], frame["duration_s"]))
        self._cancel_deadline()
        self._send_waiting()

    def _on_end(self, connection: ServerConnection) -> None:
        if connection is self._connection:
            self._discard_connection("grader died")

    def _on_deadline(self) -> None:
        if self._connection is not None:
            self._connection.kill()
            self._discard_connection("grader timed out")

    def _discard_connection(self, cause: str) -> None:
        """Send the requests in flight to a new grader, or fail them after their last attempt."""
        assert self._connection is not None
        structlog.get_logger().error("grader.lost", cause=cause, gradings=len(self._in_flight))
        start_task(self._stop_tasks, self._connection.stop())
        self._connection = None
        self._cancel_deadline()
        for request in reversed(self._in_flight.values()):
            if request.num_attempts < _MAX_ATTEMPTS:
                self._waiting.appendleft(request)
            else:
                request.fail(cause)
        self._in_flight.clear()
        self._send_waiting()

    def _start_deadline(self) -> None:
        limit_s = MAX_GRADE_WALL * self._settings.time_limit_s + _HANG_S
        self._deadline = asyncio.get_running_loop().call_later(limit_s, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _fail_all(self, cause: str) -> None:
        for request in (*self._in_flight.values(), *self._waiting):
            request.fail(cause)
        self._in_flight.clear()
        self._waiting.clear()
