"""The host processes of one task in an executor, and the instances of its trajectories.

The pool replaces a process that dies. If the task is replayable, the pool creates the instances of that process again
and repeats their calls; else their trajectories fail. The pool sends the calls of an instance one after another.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from asterism.bus.messages import (
    OPENING_CALL,
    AnsweredCall,
    AnswerSubmitted,
    EnvironmentCalled,
    EnvironmentHistory,
    EnvironmentOutcome,
    EnvironmentRestored,
    digest_outcome,
)
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks.hosting.host_process import HostCommand, HostDied, HostFailure, HostProcess, RunProgramFunction
from asterism.tasks.hosting.wire import (
    Call,
    Close,
    Failed,
    HostMessage,
    HostReply,
    Inspect,
    Inspected,
    Open,
    Returned,
    Score,
    Scored,
)

_MAX_ATTEMPTS = 2  # attempts of a call, each in another process


class CallResult(NamedTuple):
    outcome: EnvironmentOutcome
    duration_s: float


@dataclass
class _Instance:
    slot: "_Slot"
    process: HostProcess | None = None  # process that has the instance; None: not created yet, or lost
    history: list[AnsweredCall] = field(default_factory=list[AnsweredCall])
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Slot:
    """A host process and its successors."""

    def __init__(self, command: HostCommand, run_program: RunProgramFunction) -> None:
        self._command, self._run_program = command, run_program
        self._start_task: asyncio.Task[HostProcess] | None = None  # start of the current process
        self.num_instances = 0

    @property
    def load(self) -> tuple[int, int]:
        process = self.find_process()
        return (self.num_instances, process.num_open if process else 0)

    async def get_process(self) -> HostProcess:
        """Return a live process. The cancellation of a call does not cancel the start. Raises HostFailure."""
        process = self.find_process()
        is_starting = self._start_task is not None and not self._start_task.done()
        if self._start_task is None or not (is_starting or (process is not None and process.is_alive)):
            self._start_task = asyncio.create_task(self._replace(process))
        return await asyncio.shield(self._start_task)

    async def close(self) -> None:
        if self._start_task is not None:
            await asyncio.wait([self._start_task])
        if (process := self.find_process()) is not None:
            await process.stop()

    def find_process(self) -> HostProcess | None:
        task = self._start_task
        return task.result() if task is not None and task.done() and task.exception() is None else None

    async def _replace(self, process: HostProcess | None) -> HostProcess:
        if process is not None:
            await process.stop()
        return await HostProcess.start(self._command, self._run_program)


class HostPool:
    """The host processes and instances of a task. The waiting callers and the live trajectories bound the pool's size.

    `repeats_calls`: restored instances repeat their calls although the task is not replayable, for a second scoring.
    """

    def __init__(
        self,
        command: HostCommand,
        description: TaskDescription,
        run_program: RunProgramFunction,
        *,
        processes: int = 1,
        repeats_calls: bool = False,
    ) -> None:
        self._description = description
        self._is_replayable = repeats_calls or description.is_replayable
        self._slots = [_Slot(command, run_program) for _ in range(processes)]
        self._instances: dict[int, _Instance] = {}  # by trajectory

    @property
    def pids(self) -> list[int]:
        return [process.pid for slot in self._slots if (process := slot.find_process()) is not None]

    @property
    def num_instances(self) -> int:
        return len(self._instances)

    async def call(self, request: EnvironmentCalled) -> CallResult:
        """Call a tool or an instance. Raises HostFailure."""
        if not self._description.has_instances:
            return await self._call_tool(request)
        instance = self._instances.get(request.trajectory_id)
        if instance is None:
            instance = self._add_instance(request.trajectory_id)
        async with instance.turn:
            if request.call == OPENING_CALL:
                instance.history.clear()  # drops an opening that failed
            result = await self._call_instance(instance, request.trajectory_id, request.method, request.arguments)
            digest = digest_outcome(result.outcome)
            instance.history.append(AnsweredCall(request.method, request.arguments, digest))
            return result

    async def score(self, submission: AnswerSubmitted) -> Scored:
        """Score a trajectory. Raises HostFailure."""
        instance = self._instances.get(submission.trajectory_id)
        if instance is None:
            reply = await self._request_anywhere(lambda number: Score(number, submission))
        else:
            async with instance.turn:
                reply = await self._request(
                    instance, submission.trajectory_id, lambda number: Score(number, submission)
                )
        assert isinstance(reply, Scored)
        return reply

    def restore(self, message: EnvironmentRestored) -> None:
        """Adopt an instance of another executor. The pool repeats the instance's calls before its next call."""
        self._add_instance(message.trajectory_id).history = list(message.calls)

    async def repeat(self, message: EnvironmentRestored) -> EnvironmentHistory:
        """Repeat the calls in a new instance, and return their history with sums computed anew. Raises HostFailure."""
        instance = self._add_instance(message.trajectory_id)
        instance.history = list(message.calls)
        try:
            process = await instance.slot.get_process()
            history = await self._repeat_calls(instance, process, message.trajectory_id)
        except HostDied as error:
            raise HostFailure(str(error)) from error
        instance.process = process
        return history

    async def inspect(self) -> Inspected:
        """Inspect the first process. Raises HostFailure."""
        process = await self._slots[0].get_process()
        try:
            reply = _raise_failure(await process.request(Inspect))
        except HostDied as error:
            raise HostFailure(str(error)) from error
        assert isinstance(reply, Inspected)
        return reply

    def end(self, trajectory_id: int) -> None:
        instance = self._instances.pop(trajectory_id, None)
        if instance is None:
            return
        instance.slot.num_instances -= 1
        if (process := instance.slot.find_process()) is not None:
            process.send(Close(0, trajectory_id))

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots))

    # ---------------------------------------------------------------- tools

    async def _call_tool(self, request: EnvironmentCalled) -> CallResult:
        """Call a tool once: the rollout process retries a failed call."""
        process = await min(self._slots, key=lambda slot: slot.load).get_process()
        try:
            reply = await process.request(
                lambda number: Call(number, request.trajectory_id, request.method, request.arguments)
            )
        except HostDied as error:
            raise HostFailure(str(error)) from error
        return _read_result(reply)

    async def _request_anywhere(self, build: Callable[[int], HostMessage]) -> HostReply:
        cause = ""
        for _ in range(_MAX_ATTEMPTS):
            process = await min(self._slots, key=lambda slot: slot.load).get_process()
            try:
                return _raise_failure(await process.request(build))
            except HostDied as error:
                cause = str(error)
        raise HostFailure(cause)

    # ---------------------------------------------------------------- instances

    def _add_instance(self, trajectory_id: int) -> _Instance:
        self.end(trajectory_id)
        slot = min(self._slots, key=lambda each: each.load)
        slot.num_instances += 1
        instance = self._instances[trajectory_id] = _Instance(slot)
        return instance

    async def _call_instance(
        self, instance: _Instance, trajectory_id: int, method: str, arguments: bytes
    ) -> CallResult:
        def build(number: int) -> HostMessage:
            return _build_request(number, trajectory_id, method, arguments)

        return _read_result(await self._request(instance, trajectory_id, build))

    async def _request(self, instance: _Instance, trajectory_id: int, build: Callable[[int], HostMessage]) -> HostReply:
        """Send a request to the process of the instance. Create a lost instance again, or raise HostFailure."""
        cause = "the process that had the instance died"
        for _ in range(_MAX_ATTEMPTS):
            process = await instance.slot.get_process()
            try:
                if instance.process is not process and instance.history:
                    if not self._is_replayable:
                        break
                    num_calls = len(instance.history)
                    structlog.get_logger().info("instance.restored", trajectory_id=trajectory_id, calls=num_calls)
                    await self._repeat_calls(instance, process, trajectory_id)
                instance.process = process
                return _raise_failure(await process.request(build))
            except HostDied as error:
                cause = str(error)
        raise HostFailure(cause)

    async def _repeat_calls(self, instance: _Instance, process: HostProcess, trajectory_id: int) -> EnvironmentHistory:
        """Repeat the calls. Raises HostDied, and HostFailure if a call has another outcome than before."""
        process.send(Close(0, trajectory_id))  # closes the instance of an earlier attempt
        history = EnvironmentHistory()
        for index, call in enumerate(instance.history):

            def build(number: int, call: AnsweredCall = call) -> HostMessage:
                return _build_request(number, trajectory_id, call.method, call.arguments)

            outcome = _read_result(await process.request(build)).outcome
            if digest_outcome(outcome) != call.digest:
                name = f"call {index} of {call.method}" if call.method else "the opening"
                raise HostFailure(f"{name} has another result when it is repeated")
            history = history.add_call(call, outcome)
        return history


def _build_request(number: int, trajectory_id: int, method: str, arguments: bytes) -> HostMessage:
    """Build the request of a call. An empty method opens the instance, with the row as its arguments."""
    if not method:
        return Open(number, trajectory_id, arguments)
    return Call(number, trajectory_id, method, arguments)


def _read_result(reply: HostReply) -> CallResult:
    reply = _raise_failure(reply)
    assert isinstance(reply, Returned)
    return CallResult(reply.outcome, reply.duration_s)


def _raise_failure(reply: HostReply) -> HostReply:
    if isinstance(reply, Failed):
        raise HostFailure(reply.cause)
    return reply
