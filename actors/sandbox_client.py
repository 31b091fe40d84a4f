"""A sandbox behind the bus, as its user sees it: `asterism sandbox serve` at the other end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from bus.codec import MalformedFrame
from bus.lanes import LANES
from bus.messages import AnswerGraded, AnswerSubmitted, CallFailed, CodeFinished, CodeRequested, SessionEnded
from bus.zeromq import socket_of, zmq_bus
from configs.errors import UnusableInput
from sandbox.contract import CodeResult, Grade, SandboxFailure

SERVED = "executor-0"  # the address of a sandbox that is served by itself
_QUEUE_MESSAGES = 65_536
_GRADING = -1
_WATCH_S = 1.0
_ENDED = "the sandbox is served no longer"


def is_served(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(socket_of(folder, SERVED)))
        except OSError:
            return False
    return True


class SandboxClient:
    """Runs calls at the executor in `folder`. An asynchronous context manager."""

    def __init__(self, folder: Path) -> None:
        if not is_served(folder):
            raise UnusableInput(
                f"--at {folder}: no sandbox is served there; start one: asterism sandbox serve --at {folder}"
            )
        self._name = f"client-{os.getpid()}"
        session = time.time_ns()  # the process's number, and so the name, may have been another client's
        self._bus = zmq_bus(self._name, folder, _QUEUE_MESSAGES, session)
        self._open: dict[tuple[int, int], asyncio.Future[CodeResult | Grade]] = {}
        self._folder = folder
        loop = asyncio.get_running_loop()
        self._receiving, self._watching = loop.create_task(self._receive()), loop.create_task(self._watch())

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._receiving, self._watching
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._bus.close()
        for lane in LANES:
            socket_of(self._folder, self._name, lane).unlink(missing_ok=True)

    async def run(self, call: CodeRequested) -> CodeResult:
        """Raises SandboxFailure."""
        result = await self._answer((call.trajectory_id, call.call), call)
        assert isinstance(result, CodeResult)
        return result

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        """Raises SandboxFailure."""
        grade = await self._answer((submission.trajectory_id, _GRADING), submission)
        assert isinstance(grade, Grade)
        return grade

    async def end_session(self, trajectory_id: int) -> None:
        await self._bus.send(SERVED, SessionEnded(trajectory_id))

    async def _answer(self, key: tuple[int, int], message: CodeRequested | AnswerSubmitted) -> CodeResult | Grade:
        if self._watching.done():
            raise SandboxFailure(_ENDED)
        if key in self._open:
            raise ValueError(f"trajectory {key[0]} asks twice at once for the same answer")
        answer = self._open[key] = asyncio.get_running_loop().create_future()
        try:
            await self._bus.send(SERVED, message)
            return await answer
        finally:
            del self._open[key]

    async def _watch(self) -> None:
        """Until the server has ended: then it answers nobody."""
        while is_served(self._folder):  # noqa: ASYNC110 - nobody here is told of its end
            await asyncio.sleep(_WATCH_S)
        for key in list(self._open):
            self._settle(key, SandboxFailure(_ENDED))

    async def _receive(self) -> None:
        """A frame that is no message comes from no sandbox of ours: it is dropped."""
        while True:
            with contextlib.suppress(MalformedFrame):
                await self._receive_one()

    async def _receive_one(self) -> None:
        match (await self._bus.receive()).message:
            case CodeFinished(trajectory_id=trajectory, call=call, outcome=outcome, duration_s=duration_s):
                self._settle((trajectory, call), CodeResult(outcome, duration_s))
            case AnswerGraded(trajectory_id=trajectory, correct=correct, duration_s=duration_s):
                self._settle((trajectory, _GRADING), Grade(correct, duration_s))
            case CallFailed(trajectory_id=trajectory, call=call, cause=cause):
                self._settle((trajectory, call), SandboxFailure(cause))
            case _:
                pass  # word for rollouts, which a client is not

    def _settle(self, key: tuple[int, int], answer: CodeResult | Grade | SandboxFailure) -> None:
        waiting = self._open.get(key)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, SandboxFailure):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)
