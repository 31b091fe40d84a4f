"""Whether an answer equals the ground truth: at once where both are plain, else by the grader's process.

The grader's requests are pipelined; the one that it works on has `grade_limit_s`. One that hangs or crashes the grader
raises SandboxFailure, and those behind it go to the next grader.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque

from sandbox.contract import Grade, SandboxFailure
from sandbox.host import Host
from sandbox.inside.frames import Frame
from sandbox.inside.settings import Settings
from sandbox.server_process import ServerProcess

QUEUED_GRADINGS = 65_536  # beyond them grade() raises SandboxFailure
_SENT_AHEAD = 16  # requests in the grader's socket, so that it never waits for the executor
_ANSWER_CHARACTERS = 4096  # a longer answer is compared as a string only: no final answer is so long
_NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?", re.ASCII)
_MODULE = "sandbox.inside.grader"
_CLOSING = "the sandbox is closing"


def plain_verdict(answer: str, truth: str) -> bool | None:
    """The verdict where it needs no mathematics: two plain decimal numbers, or equal strings. None: ask math-verify."""
    mine, theirs = _number(answer), _number(truth)
    if mine is not None and theirs is not None:
        return mine == theirs
    if _normalized(answer) == _normalized(truth):
        return True
    return False if len(answer) > _ANSWER_CHARACTERS else None


def _number(text: str) -> tuple[bool, str, str] | None:
    """(negative, digits before the point, digits behind it), without zeros that change nothing."""
    match = _NUMBER.fullmatch(text.strip().strip("$").strip())
    if match is None or not (match[2] or match[3]):
        return None
    whole, fraction = match[2].lstrip("0"), (match[3] or "").rstrip("0")
    return match[1] == "-" and bool(whole or fraction), whole, fraction


def _normalized(text: str) -> str:
    return "".join(text.strip().strip("$").split())


class _Request:
    def __init__(self, number: int, answer: str, truth: str) -> None:
        self.frame: Frame = {"id": number, "answer": answer, "truth": truth}
        self.verdict: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()


class Grader:
    """Starts its process when the first answer needs it, and again after it was lost."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        self._settings = settings
        self._process: ServerProcess | None = None
        self._starting: asyncio.Task[None] | None = None
        self._waiting: deque[_Request] = deque()
        self._sent: deque[_Request] = deque()  # in the order in which they are answered
        self._began_at = 0.0  # of the first of `_sent`
        self._deadline: asyncio.TimerHandle | None = None
        self._numbers = 0
        self._stopping: set[asyncio.Task[None]] = set()
        self._closing = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def grade(self, answer: str, truth: str) -> Grade:
        started_at = time.monotonic()
        verdict = plain_verdict(answer, truth)
        if verdict is not None:
            return Grade(verdict, time.monotonic() - started_at)
        if self._closing:
            raise SandboxFailure(_CLOSING)
        if len(self._waiting) >= QUEUED_GRADINGS:
            raise SandboxFailure("the sandbox's queue of gradings is full")
        self._numbers += 1
        request = _Request(self._numbers, answer, truth)
        self._waiting.append(request)
        self._advance()
        return await request.verdict

    async def close(self) -> None:
        self._closing = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        process, self._process = self._process, None
        self._stop_clock()
        self._fail_all(_CLOSING)
        if process is not None:
            await process.stop()
        await asyncio.gather(*self._stopping)

    def _advance(self) -> None:
        """Sends what the grader may hold; starts it if there is none."""
        if self._process is None:
            if self._starting is None and self._waiting:
                self._starting = asyncio.get_running_loop().create_task(self._start())
            return
        while self._waiting and len(self._sent) < _SENT_AHEAD:
            request = self._waiting.popleft()
            if request.verdict.done():
                continue  # cancelled
            if not self._sent:
                self._start_clock()
            self._sent.append(request)
            self._process.send(request.frame)

    async def _start(self) -> None:
        def on_frame(frame: Frame) -> None:
            self._on_frame(process, frame)

        process = ServerProcess(self._host, _MODULE, on_frame, lambda: self._on_end(process))
        try:
            await process.start(self._settings)
        except (SandboxFailure, OSError) as error:
            self._starting = None
            self._fail_all(f"the grader cannot start: {error}")
            return
        self._starting = None
        self._process = process
        self._advance()

    def _on_frame(self, process: ServerProcess, frame: Frame) -> None:
        if process is not self._process:
            return  # it was given up, and its request blamed
        request = self._sent.popleft()
        assert request.frame["id"] == frame["id"]
        if not request.verdict.done() and frame["correct"] is None:
            request.verdict.set_exception(SandboxFailure("the ground truth cannot be read"))
        elif not request.verdict.done():
            request.verdict.set_result(Grade(frame["correct"], time.monotonic() - self._began_at))
        self._stop_clock()
        if self._sent:
            self._start_clock()
        self._advance()

    def _on_end(self, process: ServerProcess) -> None:
        if process is self._process:
            self._give_up("grader died")

    def _on_deadline(self) -> None:
        process = self._process
        if process is not None:
            process.kill()
            self._give_up("grader timed out")

    def _give_up(self, cause: str) -> None:
        """The first that was sent has brought the grader down; the others are asked again."""
        assert self._process is not None
        task = asyncio.get_running_loop().create_task(self._process.stop())
        self._process = None
        self._stop_clock()
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)
        if self._sent:
            guilty = self._sent.popleft()
            if not guilty.verdict.done():
                guilty.verdict.set_exception(SandboxFailure(cause))
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        self._advance()

    def _start_clock(self) -> None:
        self._began_at = time.monotonic()
        self._deadline = asyncio.get_running_loop().call_later(self._settings.time_limit_s, self._on_deadline)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _fail_all(self, cause: str) -> None:
        for request in (*self._sent, *self._waiting):
            if not request.verdict.done():
                request.verdict.set_exception(SandboxFailure(cause))
        self._sent.clear()
        self._waiting.clear()
