"""The executor: a sandbox behind the bus.

Consumes calls, answers to grade and ends of sessions; produces outcomes and grades. A slow call delays no other: each is
a task of its own, and the sandbox bounds how many run and wait. What breaks is reported as a failure, never as a result.
"""

from __future__ import annotations

import structlog

from actors.service import Work, serve
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    CallFailed,
    CodeFinished,
    CodeRequested,
    Envelope,
    SessionEnded,
)
from bus.transport import Bus
from sandbox.contract import Sandbox, SandboxFailure

GRADING = -1  # a grading's number in CallFailed


class Executor:
    def __init__(self, bus: Bus, sandbox: Sandbox) -> None:
        self._bus = bus
        self._sandbox = sandbox
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Until Shutdown; calls that are under way then are stopped."""
        isolation = await self._sandbox.start()
        self._logger.info("sandbox.started", **{name: getattr(isolation, name) for name in isolation.__struct_fields__})
        try:
            await serve(self._bus, self._take)
        finally:
            await self._sandbox.close()

    def _take(self, envelope: Envelope) -> Work | None:
        match envelope.message:
            case CodeRequested() as call:
                return self._run_call(envelope.sender, call)
            case AnswerSubmitted() as submission:
                return self._grade(envelope.sender, submission)
            case SessionEnded(trajectory_id=trajectory_id):
                return self._sandbox.end_session(trajectory_id)
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)
        return None

    async def _run_call(self, sender: str, call: CodeRequested) -> None:
        answer: AnyMessage
        try:
            result = await self._sandbox.run(call)
        except SandboxFailure as error:
            self._logger.error("call.failed", trajectory_id=call.trajectory_id, call=call.call, cause=str(error))
            answer = CallFailed(call.trajectory_id, call.call, f"sandbox: {error}")
        else:
            answer = CodeFinished(call.trajectory_id, call.call, result.outcome, result.duration_s)
        await self._bus.send(sender, answer)

    async def _grade(self, sender: str, submission: AnswerSubmitted) -> None:
        answer: AnyMessage
        try:
            grade = await self._sandbox.grade(submission)
        except SandboxFailure as error:
            self._logger.error("grading.failed", trajectory_id=submission.trajectory_id, cause=str(error))
            answer = CallFailed(submission.trajectory_id, GRADING, f"grader: {error}")
        else:
            answer = AnswerGraded(submission.trajectory_id, grade.correct, grade.duration_s)
        await self._bus.send(sender, answer)
