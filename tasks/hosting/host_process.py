"""The client of a host process: start, requests, hang detection and end of the process."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog

import asterism
from asterism.bus.process.parent_death import PARENT_PID_VARIABLE
from asterism.bus.process.waiting import start_task
from asterism.tasks.hosting.wire import (
    Alive,
    Failed,
    HostMessage,
    HostReply,
    HostSettings,
    ProgramEnded,
    Ready,
    RunProgram,
    encode_with_length,
    read_body,
    reply_decoder,
)

_HANG_S = 30.0  # silence beyond the time limit of a call, before the process is killed
_START_LIMIT_S = 300.0  # time for the imports, until the process is ready
_STOP_S = 1.5  # time from the end of the connection to the kill, for the closing of instances
_LAST_ANSWERS_S = 0.5  # time from the end of the process to the end of the connection
# A task may name an interpreter in which this project is not installed. The project's folder is in sys.path only for
# the import, because the folder's other packages (in site-packages or a checkout) do not belong to the task.
_FOLDER = str(Path(str(asterism.__file__)).parents[1])
_BOOT_SCRIPT = """
import sys
folder = sys.argv.pop(1)
sys.path.insert(0, folder)
import asterism
sys.path.remove(folder)
from asterism.tasks.hosting.task_host import main
sys.exit(main())
"""

RunProgramFunction = Callable[[RunProgram], Awaitable[ProgramEnded]]


class HostFailure(Exception):
    """A call has no result. The rollout process retries the call; then the trajectory is masked, never scored."""


class HostDied(Exception):
    """The process ended before its answer."""


class HostCommand(msgspec.Struct, frozen=True):
    settings: HostSettings
    python: str = ""  # interpreter; empty: the interpreter of the run
    variables: dict[str, str] = {}  # environment variables

    def build_arguments(self) -> list[str]:
        """Build the arguments without the settings, because every user of the machine can read arguments."""
        return [self.python or sys.executable, "-P", "-c", _BOOT_SCRIPT, _FOLDER]

    def build_input(self) -> bytes:
        """Build the content of the process's stdin: the settings."""
        return msgspec.json.encode(self.settings)

    def build_environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables}


class HostProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: HostSettings,
        run_program: RunProgramFunction,
    ) -> None:
        self._process = process
        self._writer = writer
        self._name = f'the host process of task "{settings.task}"' if settings.task else "the process of the rewards"
        self._limit_s = max(settings.call_limit_s, settings.reward_limit_s)
        self._run_program = run_program
        self._programs: set[asyncio.Task[None]] = set()
        self._open: dict[int, asyncio.Future[HostReply]] = {}  # by number
        self._num_requests = 0
        self._is_ready = self._is_stopping = False
        self._load_error = self._death = ""
        self._hang_timer: asyncio.TimerHandle | None = None
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # the process has already ended
            self._pidfd = os.pidfd_open(process.pid)
        self._reading = asyncio.create_task(self._read(reader))
        self._watching = asyncio.create_task(self._end_connection())

    @classmethod
    async def start(cls, command: HostCommand, run_program: RunProgramFunction) -> "HostProcess":
        """Start a host process. Raises HostFailure."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "asterism.bus.process.parent_death", *command.build_arguments()),
                *("--socket", str(theirs.fileno())),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**command.build_environment(), PARENT_PID_VARIABLE: str(os.getpid())},
                start_new_session=True,  # so that ^C in the terminal of a chat ends no instance
            )
        except OSError as error:
            ours.close()
            raise HostFailure(f"cannot start a host process: {error.strerror}") from None
        finally:
            theirs.close()
        host = cls(process, *await asyncio.open_connection(sock=ours), command.settings, run_program)
        assert process.stdin is not None
        process.stdin.write(command.build_input())  # asyncio ignores the end of the process
        process.stdin.close()
        return host

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._reading.done()

    @property
    def num_open(self) -> int:
        """The number of calls without an answer."""
        return len(self._open)

    async def request(self, build: Callable[[int], HostMessage]) -> HostReply:
        """Send a request, which `build` makes from its number, and return the answer. Raises HostDied."""
        self._num_requests += 1
        number = self._num_requests
        reply = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(encode_with_length(build(number)))
            if len(self._open) == 1:  # the timer of an earlier, cancelled call may still run
                self._restart_hang_timer()
            with contextlib.suppress(ConnectionError):  # the end of the process is reported below
                await self._writer.drain()
            if not self.is_alive:
                raise HostDied(self._death)
            return await reply
        finally:
            self._open.pop(number, None)

    def send(self, message: HostMessage) -> None:
        """Send a message that has no answer."""
        if self.is_alive:
            self._writer.write(encode_with_length(message))

    async def stop(self) -> None:
        self._is_stopping = True
        self._cancel_hang_timer()
        self._writer.close()
        finished, _ = await asyncio.wait([self._reading], timeout=_STOP_S)
        if not finished:
            self._kill()
        await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Receive replies until the process closes the connection."""
        try:
            while True:
                self._on_reply(reply_decoder.decode(await read_body(reader)))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            if not self._is_stopping:
                self._kill()  # the process may run, with a closed or damaged socket
            exit_code = await self._process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._watching.cancel()
        self._cancel_hang_timer()
        for program in self._programs:
            program.cancel()
        if not self._is_stopping:
            structlog.get_logger().error("task_host.died", exit_code=exit_code, calls=len(self._open))
        self._death = self._load_error or f"{self._name} died with exit code {exit_code}"
        for reply in self._open.values():
            if not reply.done():
                reply.set_exception(HostDied(self._death))

    async def _end_connection(self) -> None:
        """End the connection after the process: a child that the task's code forked may keep the connection open."""
        await self._process.wait()
        await asyncio.wait([self._reading], timeout=_LAST_ANSWERS_S)
        self._writer.transport.abort()

    def _on_reply(self, reply: HostReply) -> None:
        match reply:
            case Ready():
                self._is_ready = True
            case Alive():
                pass
            case Failed(number=0, cause=cause):
                self._load_error = cause
            case RunProgram():
                start_task(self._programs, self._answer_program(reply))
            case _:
                waiting = self._open.pop(reply.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        self._restart_hang_timer()

    async def _answer_program(self, request: RunProgram) -> None:
        self.send(await self._run_program(request))

    def _restart_hang_timer(self) -> None:
        self._cancel_hang_timer()
        if self._open:
            limit_s = self._limit_s + _HANG_S + (0.0 if self._is_ready else _START_LIMIT_S)
            self._hang_timer = asyncio.get_running_loop().call_later(limit_s, self._on_hang)

    def _on_hang(self) -> None:
        self._hang_timer = None
        if self._open and self.is_alive:  # otherwise the calls were cancelled
            structlog.get_logger().error("task_host.hangs", calls=len(self._open))
            self._kill()

    def _kill(self) -> None:
        """Kill the process, but unlike asyncio's kill, never reap it, so that asyncio receives the exit code."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _cancel_hang_timer(self) -> None:
        if self._hang_timer is not None:
            self._hang_timer.cancel()
            self._hang_timer = None
