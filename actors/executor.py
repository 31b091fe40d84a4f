"""The executor: a sandbox behind the bus.

Consumes calls, answers to grade, notebooks to make again and ends of trajectories; produces outcomes and grades. A slow
call delays no other: each is a task of its own. What breaks is reported as a failure, never as a result. A trajectory's
end stops what is under way for it, and nothing is answered to that any more.

Bounds: `max_calls` are in the sandbox, waiting or running; as many again wait before it, where a trajectory's end still
finds them; beyond these nothing is received, and the bus makes those who send wait. Receiving always goes on: a call
leaves by its time limit at the latest, and an answer that waits to be sent takes no room, so that two processes never
wait for each other's full queues.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import structlog

from actors.service import Work, serve
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    Envelope,
    ExecutorJoined,
    ExecutorProved,
    SessionEnded,
    SessionRestored,
)
from bus.transport import Bus
from policies.trajectory import GRADING
from sandbox.contract import Sandbox, SandboxFailure
from sandbox.repeatable import repeatable

MAX_CALLS = 65_536


class Executor:
    """`address` is that of this life of it: what is addressed to another one is dropped. `launcher` hears that it joins.

    With `strict`, of what calls said only what is `repeatable` is answered.
    """

    def __init__(
        self,
        bus: Bus,
        sandbox: Sandbox,
        *,
        address: str = "",
        slots: int = 1,
        max_calls: int = MAX_CALLS,
        launcher: str = "",
        strict: bool = False,
    ) -> None:
        self._bus = bus
        self._sandbox = sandbox
        self._address = address or bus.process
        self._slots = slots
        self._max_calls = max_calls
        self._launcher = launcher
        self._strict = strict
        self._sandbox_room = asyncio.Semaphore(max_calls)
        self._held: set[asyncio.Task[None]] = set()  # calls and gradings without a result
        self._freed = asyncio.Event()
        self._under_way: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)  # by trajectory
        self._proved = False
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Until Shutdown; calls that are under way then are stopped. Raises SandboxFailure if nothing can be run, or nothing
        any more."""
        isolation = await self._sandbox.start()
        self._logger.info("sandbox.started", **{name: getattr(isolation, name) for name in isolation.__struct_fields__})
        try:
            if self._launcher:
                await self._bus.send(self._launcher, ExecutorJoined(self._address, self._slots))
            await self._serve()
        finally:
            await self._sandbox.close()

    async def _serve(self) -> None:
        serving = asyncio.create_task(serve(self._bus, self._take, started=self._started, room=self._until_room))
        breaking = asyncio.create_task(self._sandbox.until_broken())
        try:
            done, _ = await asyncio.wait((serving, breaking), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (serving, breaking):
                task.cancel()
            await asyncio.gather(serving, breaking, return_exceptions=True)

    def _take(self, envelope: Envelope) -> Work | None:
        if envelope.to != self._address:  # a former life was meant: who asked knows that it is over
            self._logger.debug("message.outlived", to=envelope.to, kind=type(envelope.message).__name__)
            return None
        match envelope.message:
            case CodeRequested() as call:
                return self._run_call(envelope.sender, call)
            case AnswerSubmitted() as submission:
                return self._grade(envelope.sender, submission)
            case SessionRestored(trajectory_id=trajectory_id, cells=cells):
                self._sandbox.restore_session(trajectory_id, cells)
            case SessionEnded(trajectory_id=trajectory_id):
                for task in self._under_way.get(trajectory_id, ()):
                    task.cancel()
                return self._sandbox.end_session(trajectory_id)
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)
        return None

    def _started(self, envelope: Envelope, task: asyncio.Task[None]) -> None:
        if isinstance(envelope.message, CodeRequested | AnswerSubmitted):
            trajectory_id = envelope.message.trajectory_id
            self._held.add(task)
            self._under_way[trajectory_id].add(task)
            task.add_done_callback(lambda _: self._ended(trajectory_id, task))

    async def _until_room(self, envelope: Envelope) -> None:
        while isinstance(envelope.message, CodeRequested | AnswerSubmitted) and len(self._held) >= 2 * self._max_calls:
            self._freed.clear()
            await self._freed.wait()

    def _has_result(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._held.discard(task)
            self._freed.set()

    def _ended(self, trajectory_id: int, task: asyncio.Task[None]) -> None:
        self._has_result(task)
        self._under_way[trajectory_id].discard(task)
        if not self._under_way[trajectory_id]:
            del self._under_way[trajectory_id]

    async def _run_call(self, sender: str, call: CodeRequested) -> None:
        try:
            async with self._sandbox_room:
                result = await self._sandbox.run(call)
        except SandboxFailure as error:
            self._logger.error("call.failed", trajectory_id=call.trajectory_id, call=call.call, cause=str(error))
            await self._send(sender, CallFailed(call.trajectory_id, call.call, f"sandbox: {error}", self._address))
            return
        outcome = repeatable(result.outcome) if self._strict else result.outcome
        duration_s = result.duration_s
        await self._send(sender, CodeFinished(call.trajectory_id, call.call, outcome, duration_s, self._address))

    async def _grade(self, sender: str, submission: AnswerSubmitted) -> None:
        trajectory_id = submission.trajectory_id
        try:
            async with self._sandbox_room:
                grade = await self._sandbox.grade(submission)
        except SandboxFailure as error:
            self._logger.error("grading.failed", trajectory_id=trajectory_id, cause=str(error))
            await self._send(sender, CallFailed(trajectory_id, GRADING, f"grader: {error}", self._address))
            return
        await self._send(sender, AnswerGraded(trajectory_id, grade.correct, grade.duration_s, self._address))

    async def _send(self, sender: str, answer: CodeFinished | AnswerGraded | CallFailed) -> None:
        self._has_result(asyncio.current_task())
        await self._bus.send(sender, answer)
        if self._launcher and not self._proved and not isinstance(answer, CallFailed):
            self._proved = True
            await self._bus.send(self._launcher, ExecutorProved(self._address))
