"""The executor connects a sandbox and the host processes of tasks to the bus.

Consumes calls, answers to grade, notebooks and instances to restore, and ends of trajectories; produces outcomes and
grades. Each call is a separate task, so a slow call does not delay the others. A failure of the sandbox or of a task's
code is reported as CallFailed, never as a result. The end of a trajectory cancels its calls and gradings, which are then
not answered.

Bounds: at most `max_calls` calls wait or run in the sandbox. As many again wait in the executor, where the end of their
trajectory can cancel them. At this bound the executor stops receiving, and the bus applies back-pressure to the senders.
It always resumes: every call ends at its time limit at the latest, and answers in the send queue do not count, so two
processes never wait for each other's full queues.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import structlog
from msgspec.structs import asdict

from asterism.actors.runtime.worker_loop import MessageChannel, Work, serve
from asterism.bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    Envelope,
    EnvironmentCalled,
    EnvironmentRestored,
    EnvironmentReturned,
    ExecutorHealthy,
    ExecutorJoined,
    SessionEnded,
    SessionRestored,
)
from asterism.bus.process.waiting import wait_for_first
from asterism.policies.rollout.trajectory import GRADING_CALL, CallAnswer
from asterism.sandbox.contract import Isolation, Sandbox, SandboxFailure
from asterism.sandbox.load_gauge import SandboxLoad
from asterism.sandbox.output_scrubbing import scrub_outcome
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_services import TaskServices, build_grading_services

MAX_CALLS = 65_536
REPORT_INTERVAL_S = 1.0

_Call = CodeRequested | EnvironmentCalled | AnswerSubmitted


class Executor:
    """An executor at `address`, the address of this incarnation; messages to other addresses are dropped.

    ExecutorJoined goes to `launcher`, if given. `strict` scrubs unrepeatable details from the outcomes of calls.
    `on_isolated` is called with the sandbox's isolation before the executor joins. The default `tasks` only grade.
    """

    def __init__(
        self,
        bus: MessageChannel,
        sandbox: Sandbox,
        *,
        address: str = "",
        slots: int = 1,
        max_calls: int = MAX_CALLS,
        launcher: str = "",
        strict: bool = False,
        on_isolated: Callable[[Isolation], None] | None = None,
        tasks: TaskServices | None = None,
    ) -> None:
        self._bus = bus
        self._sandbox = sandbox
        self._tasks = tasks or build_grading_services(sandbox)
        self._address = address or bus.process
        self._slots = slots
        self._max_calls = max_calls
        self._launcher = launcher
        self._strict = strict
        self._on_isolated = on_isolated
        self._sandbox_permits = asyncio.Semaphore(max_calls)
        self._pending: set[asyncio.Task[None]] = set()  # calls and gradings without a result
        self._capacity_freed = asyncio.Event()
        self._in_flight: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)  # tasks, by trajectory
        self._healthy_reported = False
        self._logger = structlog.get_logger()

    async def run(self) -> None:
        """Run until Shutdown, which cancels the calls in flight. Raises SandboxFailure if the sandbox breaks."""
        isolation = await self._sandbox.start()
        self._logger.info("sandbox.started", **{name: getattr(isolation, name) for name in isolation.__struct_fields__})
        try:
            if self._on_isolated is not None:
                self._on_isolated(isolation)
            if self._launcher:
                await self._bus.send(self._launcher, ExecutorJoined(self._address, self._slots))
            await self._serve()
        finally:
            await self._tasks.close()
            await self._sandbox.close()

    async def _serve(self) -> None:
        serving = serve(
            self._bus, self._dispatch, on_started=self._on_task_started, wait_for_capacity=self._wait_for_capacity
        )
        await wait_for_first(self._sandbox.wait_until_broken(), serving)

    def _dispatch(self, envelope: Envelope) -> Work | None:
        if envelope.to != self._address:  # sent to an earlier incarnation; the sender has received ExecutorLeft
            self._logger.debug("message.expired", to=envelope.to, kind=type(envelope.message).__name__)
            return None
        match envelope.message:
            case CodeRequested() as call:
                return self._run_call(envelope.sender, call)
            case EnvironmentCalled() as call:
                return self._call_environment(envelope.sender, call)
            case AnswerSubmitted() as submission:
                return self._grade(envelope.sender, submission)
            case SessionRestored(trajectory_id=trajectory_id, cells=cells):
                self._sandbox.restore_notebook(trajectory_id, cells)
            case EnvironmentRestored() as message:
                self._tasks.restore(message)
            case SessionEnded(trajectory_id=trajectory_id):
                for task in self._in_flight.get(trajectory_id, ()):
                    task.cancel()
                self._tasks.end(trajectory_id)
                return self._sandbox.end_notebook(trajectory_id)
            case other:
                self._logger.error("message.misdirected", kind=type(other).__name__)
        return None

    def _on_task_started(self, envelope: Envelope, task: asyncio.Task[None]) -> None:
        if isinstance(envelope.message, _Call):
            trajectory_id = envelope.message.trajectory_id
            self._pending.add(task)
            self._in_flight[trajectory_id].add(task)
            task.add_done_callback(lambda _: self._on_task_done(trajectory_id, task))

    async def _wait_for_capacity(self, envelope: Envelope) -> None:
        while isinstance(envelope.message, _Call) and len(self._pending) >= 2 * self._max_calls:
            self._capacity_freed.clear()
            await self._capacity_freed.wait()

    def _mark_result_ready(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._pending.discard(task)
            self._capacity_freed.set()

    def _on_task_done(self, trajectory_id: int, task: asyncio.Task[None]) -> None:
        self._mark_result_ready(task)
        self._in_flight[trajectory_id].discard(task)
        if not self._in_flight[trajectory_id]:
            del self._in_flight[trajectory_id]

    async def _run_call(self, sender: str, call: CodeRequested) -> None:
        try:
            async with self._sandbox_permits:
                result = await self._sandbox.run(call)
        except SandboxFailure as error:
            self._logger.error("call.failed", trajectory_id=call.trajectory_id, call=call.call, cause=str(error))
            await self._send(sender, CallFailed(call.trajectory_id, call.call, f"sandbox: {error}", self._address))
            return
        outcome = scrub_outcome(result.outcome) if self._strict else result.outcome
        duration_s = result.duration_s
        await self._send(sender, CodeFinished(call.trajectory_id, call.call, outcome, duration_s, self._address))

    async def _call_environment(self, sender: str, call: EnvironmentCalled) -> None:
        try:
            outcome, duration_s = await self._tasks.call(call)
        except HostFailure as error:
            self._logger.error("call.failed", trajectory_id=call.trajectory_id, call=call.call, cause=str(error))
            await self._send(sender, CallFailed(call.trajectory_id, call.call, f"environment: {error}", self._address))
            return
        await self._send(sender, EnvironmentReturned(call.trajectory_id, call.call, outcome, duration_s, self._address))

    async def _grade(self, sender: str, submission: AnswerSubmitted) -> None:
        trajectory_id = submission.trajectory_id
        try:
            async with self._sandbox_permits:
                score = await self._tasks.score(submission)
        except (SandboxFailure, HostFailure) as error:
            self._logger.error("grading.failed", trajectory_id=trajectory_id, cause=str(error))
            part = "reward" if isinstance(error, HostFailure) else "grader"
            await self._send(sender, CallFailed(trajectory_id, GRADING_CALL, f"{part}: {error}", self._address))
            return
        graded = AnswerGraded(trajectory_id, score.reward, score.duration_s, self._address, score.components)
        await self._send(sender, graded)

    async def _send(self, sender: str, answer: CallAnswer) -> None:
        self._mark_result_ready(asyncio.current_task())
        await self._bus.send(sender, answer)
        if self._launcher and not self._healthy_reported and not isinstance(answer, CallFailed):
            self._healthy_reported = True
            await self._bus.send(self._launcher, ExecutorHealthy(self._address))


async def report_load(executor: str, slots: int, read_load: Callable[[], SandboxLoad]) -> None:
    """Log the load each second while it changes, and a last time when cancelled.

    `executor` is the address of this incarnation, `slots` the number of slots that it reported to the launcher.
    """
    logger = structlog.get_logger()
    before = SandboxLoad(0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)

    def report() -> SandboxLoad:
        now = read_load()
        if now != before:
            logger.info("executor.load", executor=executor, slots=slots, **asdict(now))
        return now

    try:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            before = report()
    finally:
        report()
