"""A host process: `python -m asterism.tasks.hosting.task_host [--socket FD] < SETTINGS`.

SETTINGS is HostSettings as JSON, on stdin because other users can read arguments. Without a socket, the process loads
the task and its reward functions and prints the task's description as JSON with exit code 0, or the error on stderr.
With a socket, it answers requests until the client closes the connection. Calls of different trajectories overlap. Sync
functions run in threads, sync reward functions one at a time.

The process exits when too many sync calls hang, because Python cannot stop them. The client sends the other calls to
the next process.
"""

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from asterism.bus.messages import EnvironmentOutcome, EnvironmentRaised, EnvironmentTimedOut
from asterism.bus.process.waiting import start_task
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.configs.loading.secret_references import hide_secrets
from asterism.policies.rollout.trajectory import STEP
from asterism.policies.tools.task_description import TaskDescription
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.contract import SANDBOX, Fault
from asterism.tasks.hosting.call_results import UnusableResult, build_observation, describe_error, replace_surrogates
from asterism.tasks.hosting.function_caller import CallTimedOut, FunctionCaller
from asterism.tasks.hosting.host_inspection import LoopDelays, count_instances, list_children, list_threads
from asterism.tasks.hosting.instances import Instance
from asterism.tasks.hosting.loaded_task import LoadedTask
from asterism.tasks.hosting.program_handle import ProgramHandle, ProgramQueue
from asterism.tasks.hosting.score_calls import RewardCalls, load_reward_calls
from asterism.tasks.hosting.wire import (
    Alive,
    BatchWriter,
    Call,
    Close,
    Failed,
    HostMessage,
    HostSettings,
    Inspect,
    Inspected,
    Open,
    ProgramEnded,
    Ready,
    Returned,
    Score,
    Scored,
    encode_with_length,
    read_body,
    request_decoder,
)
from asterism.tasks.rewards.reward_functions import UnusableReward

EXIT_HANGING = 3
MAX_THREADS = 32  # threads for sync calls of tools and instances
_MAX_ABANDONED = 32  # hanging calls; a process that has only reward functions exits at the first hanging call
_MAX_ERROR_CHARACTERS = 4000
_ALIVE_INTERVAL_S = 1.0
_CLOSE_LIMIT_S = 1.0  # time to close all instances together, at the end of the process
_NO_TRAJECTORY = -1

_arguments_decoder = msgspec.json.Decoder(dict[str, Any])


class TaskHost:
    def __init__(
        self,
        settings: HostSettings,
        task: LoadedTask | None,
        description: TaskDescription,
        rewards: RewardCalls | None,
    ) -> None:
        self._settings, self._task, self._description, self._rewards = settings, task, description, rewards
        self._runner = FunctionCaller(MAX_THREADS)
        self._delays = LoopDelays()
        self._instances: dict[int, Instance] = {}  # by trajectory
        self._closing: set[asyncio.Task[None]] = set()
        self._requests: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)  # by trajectory

    async def serve(self, connection: socket.socket) -> None:
        """Answer requests until the client closes the connection."""
        reader, writer = await asyncio.open_connection(sock=connection)
        self._writer = BatchWriter(writer)
        self._programs = ProgramQueue(self._send)
        self._send(Ready(0, self._description))
        reporting = asyncio.create_task(self._report_alive())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = request_decoder.decode(await read_body(reader))
                if isinstance(request, ProgramEnded):
                    self._programs.on_ended(request)
                else:
                    self._start(request)
        reporting.cancel()
        await self._close_all()

    async def _report_alive(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_INTERVAL_S)
            if self._requests:
                self._send(Alive(0))

    def _start(self, request: Open | Call | Score | Close | Inspect) -> None:
        match request:
            case Close():
                self._start_closing(request.trajectory_id)
                return
            case Inspect():
                trajectory_id = _NO_TRAJECTORY
            case Score():
                trajectory_id = request.submission.trajectory_id
            case _:
                trajectory_id = request.trajectory_id
        task = asyncio.create_task(self._handle(request))
        open_requests = self._requests[trajectory_id]
        open_requests.add(task)

        def on_done(ended: asyncio.Task[None]) -> None:
            open_requests.discard(ended)
            if not open_requests:
                self._requests.pop(trajectory_id, None)

        task.add_done_callback(on_done)

    def _send(self, message: HostMessage) -> None:
        self._writer.write(encode_with_length(message))

    def _start_closing(self, trajectory_id: int) -> None:
        """Cancel the open requests, and then close the instance. A later Open does not wait for the end."""
        self._close_later(self._instances.pop(trajectory_id, None), *self._requests.get(trajectory_id, ()))

    def _close_later(self, instance: Instance | None, *calls: asyncio.Task[None]) -> None:
        async def close() -> None:
            for call in calls:
                call.cancel()
            if calls:
                await asyncio.wait(calls)
            if instance is not None:
                await self._close(instance)

        start_task(self._closing, close())

    async def _handle(self, request: Open | Call | Score | Inspect) -> None:
        match request:
            case Open():
                await self._answer(request, self._open)
            case Call():
                await self._answer(request, self._call)
            case Score():
                await self._answer(request, self._score)
            case Inspect():
                await self._answer(request, self._inspect)

    async def _answer(self, request: Any, work: Callable[[Any], Awaitable[HostMessage]]) -> None:
        """Answer the request exactly once, also if the task's code fails."""
        try:
            answer = encode_with_length(await work(request))
        except (UnusableResult, UnusableReward, CallTimedOut, Fault) as error:
            answer = encode_with_length(Failed(request.number, self._hide(replace_surrogates(str(error)))))
        except (Exception, SystemExit) as error:  # from the task's code
            self._log_traceback(error)
            answer = encode_with_length(Failed(request.number, self._describe(error)))
        self._writer.write(answer)
        if self._is_hanging():
            await self._writer.flush()
            os._exit(EXIT_HANGING)

    def _is_hanging(self) -> bool:
        has_instances = self._description.has_instances
        limit = _MAX_ABANDONED if has_instances or self._settings.import_path else 0
        abandoned = self._runner.num_abandoned + (self._rewards.num_abandoned if self._rewards else 0)
        return abandoned > limit

    # ---------------------------------------------------------------- instances

    async def _open(self, request: Open) -> HostMessage:
        assert self._task is not None
        began_s = time.monotonic()
        instance = Instance(self._task, self._runner, self._settings.call_limit_s)
        self._instances[request.trajectory_id] = instance
        row = _arguments_decoder.decode(request.row)
        try:
            opening = await instance.open(row, ProgramHandle(self._programs, request.trajectory_id))
        except BaseException as error:
            if self._instances.get(request.trajectory_id) is instance:
                del self._instances[request.trajectory_id]
            self._close_later(instance)
            name = "init" if self._task.kind == "dialogue" else "reset"
            raise self._name_failure(error, name) from error
        observation = build_observation(opening, self._settings.max_characters)
        return Returned(request.number, observation, time.monotonic() - began_s)

    async def _call(self, request: Call) -> HostMessage:
        began_s = time.monotonic()
        arguments = _arguments_decoder.decode(request.arguments)
        outcome = await self._make_call(request, arguments)
        return Returned(request.number, outcome, time.monotonic() - began_s)

    async def _make_call(self, request: Call, arguments: dict[str, Any]) -> EnvironmentOutcome:
        """Make a call. Errors of a tool are results for the model; errors of a dialogue raise an exception."""
        assert self._task is not None
        limit = self._settings.max_characters
        try:
            if self._task.kind == "tools":
                value = await self._call_function(request, arguments)
            elif request.method == STEP and self._task.kind == "dialogue":
                value = await self._find_instance(request.trajectory_id).step(arguments)
            else:
                value = await self._find_instance(request.trajectory_id).call_tool(request.method, arguments)
            return build_observation(value, limit)
        except CallTimedOut as error:
            if self._task.kind == "dialogue":
                raise self._name_failure(error, STEP) from error
            return EnvironmentTimedOut(error.limit_s)
        except UnusableResult as error:
            raise UnusableResult(f"{request.method} {error}") from None
        except Fault:
            raise
        except (Exception, SystemExit) as error:  # from the task's code
            if self._task.kind == "dialogue":
                raise self._name_failure(error, STEP) from error
            return EnvironmentRaised(self._hide(describe_error(error, limit)))

    async def _call_function(self, request: Call, arguments: dict[str, Any]) -> object:
        assert self._task is not None
        function = self._task.functions[request.method]
        handle = {SANDBOX: ProgramHandle(self._programs, request.trajectory_id)}
        extra = handle if self._task.takes_sandbox(function) else {}
        return await self._runner.call(function, self._settings.call_limit_s, **arguments, **extra)

    def _find_instance(self, trajectory_id: int) -> Instance:
        try:
            return self._instances[trajectory_id]
        except KeyError:
            raise Fault("the instance is not in this process") from None

    async def _score(self, request: Score) -> HostMessage:
        instance = self._instances.get(request.submission.trajectory_id)
        environment: dict[str, float] = {}
        if instance is not None:
            try:
                environment = await instance.get_reward()
            except Exception as error:
                raise self._name_failure(error, "get_reward") from error
        components: dict[str, float] = {}
        if self._rewards is not None:
            handle = ProgramHandle(self._programs, request.submission.trajectory_id)
            components = await self._rewards.score(request.submission, instance and instance.object, handle)
        return Scored(request.number, components, environment)

    async def _inspect(self, request: Inspect) -> HostMessage:
        if self._closing:
            await asyncio.wait(set(self._closing))
        self._runner.delays = self._delays
        if self._rewards is not None:
            self._rewards.runner.delays = self._delays
        live_instances = count_instances(self._task.instance_class if self._task is not None else None)
        delays_s = dict(self._delays.by_function)
        return Inspected(request.number, live_instances, list_threads(), list_children(), delays_s)

    async def _close(self, instance: Instance) -> None:
        try:
            await instance.close()
        except (Exception, SystemExit) as error:  # from the task's code
            sys.stderr.write(f"{self._settings.task}: close failed: {self._describe(error)}\n")

    # ---------------------------------------------------------------- errors

    def _name_failure(self, error: BaseException, method: str) -> BaseException:
        """Return the error with the name of the method in its text."""
        match error:
            case CallTimedOut() | UnusableResult():
                return UnusableResult(f"{method} {error}")
            case Fault() | asyncio.CancelledError():
                return error
            case _:
                self._log_traceback(error)
                return UnusableResult(f"{method} raised {self._describe(error)}")

    def _log_traceback(self, error: BaseException) -> None:
        """Write the traceback to stderr, which escapes characters that it cannot encode."""
        sys.stderr.write(self._hide("".join(traceback.format_exception(error)))[-_MAX_ERROR_CHARACTERS:])

    def _describe(self, error: BaseException) -> str:
        return self._hide(describe_error(error, _MAX_ERROR_CHARACTERS))

    def _hide(self, text: str) -> str:
        return hide_secrets(text, self._settings.secrets)

    async def _close_all(self) -> None:
        for trajectory_id in {*self._instances, *self._requests}:
            self._start_closing(trajectory_id)
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=_CLOSE_LIMIT_S)


def main() -> int:
    parser = argparse.ArgumentParser(prog="asterism.tasks.hosting.task_host")
    parser.add_argument("--socket", type=int)
    arguments = parser.parse_args()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=HostSettings)
    sys.argv[1:] = []  # a file of the task may read its own arguments
    connection = None if arguments.socket is None else socket.socket(fileno=arguments.socket)
    try:
        task = LoadedTask(settings) if settings.import_path else None
        description = asyncio.run(task.describe()) if task is not None else DEFAULT_TASK
        if connection is None:
            load_reward_calls(settings, with_tokenizer=False)
            sys.stdout.write(f"\n{msgspec.json.encode(description).decode()}\n")
            return 0
        rewards = load_reward_calls(settings, with_tokenizer=True)
    except UnusableInput as error:
        cause = hide_secrets(str(error), settings.secrets)
        sys.stderr.write(f"{cause}\n")
        if connection is not None:
            connection.sendall(encode_with_length(Failed(0, cause)))
        return EXIT_UNUSABLE
    connection.setblocking(False)
    asyncio.run(TaskHost(settings, task, description, rewards).serve(connection))
    sys.stdout.flush()
    os._exit(0)  # threads of hanging calls do not keep the process alive


if __name__ == "__main__":
    sys.exit(main())
