"""Starts and restarts the process of the reward functions, and sends it trajectories.

If the process dies, its open calls go to a new one, once. A process that answers nothing although it should is killed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

import msgspec
import structlog

from bus.messages import AnswerSubmitted
from bus.process.parent_death import PARENT_PID_VARIABLE
from tasks.rewards.reward_functions import RewardSettings
from tasks.rewards.reward_worker import LENGTH_BYTES, ScoreReply, ScoreRequest, encode_with_length

_MAX_ATTEMPTS = 2  # processes that a call is sent to
_HANG_S = 30.0  # beyond the time limit, without any answer
_START_LIMIT_S = 300.0  # for the imports of the functions, until it is ready


class RewardFailure(Exception):
    """A trajectory without a reward. It is retried and then masked, never scored."""


class RewardProcessDied(Exception):
    pass


class RewardClient:
    """Bounded by its callers: it holds one call for each `score` that waits."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._start_task: asyncio.Task[_RewardProcess] | None = None  # of the current process

    @property
    def pid(self) -> int | None:
        process = self._find_process()
        return None if process is None else process.pid

    async def score(self, submission: AnswerSubmitted) -> dict[str, float]:
        """The reward's components. Raises RewardFailure."""
        cause = ""
        for _ in range(_MAX_ATTEMPTS):
            process = await self._get_process()
            try:
                reply = await process.request(submission)
            except RewardProcessDied as error:
                cause = str(error)
                continue
            if reply.failure:
                raise RewardFailure(reply.failure)
            return reply.components
        raise RewardFailure(cause)

    async def close(self) -> None:
        if self._start_task is not None:
            await asyncio.wait([self._start_task])
        if (process := self._find_process()) is not None:
            await process.stop()

    async def _get_process(self) -> "_RewardProcess":
        """A live process. Its start survives the cancellation of a call."""
        process = self._find_process()
        is_starting = self._start_task is not None and not self._start_task.done()
        if self._start_task is None or not (is_starting or (process is not None and process.is_alive)):
            self._start_task = asyncio.create_task(self._replace(process))
        return await asyncio.shield(self._start_task)

    async def _replace(self, process: "_RewardProcess | None") -> "_RewardProcess":
        if process is not None:
            await process.stop()
        return await _RewardProcess.start(self._settings)

    def _find_process(self) -> "_RewardProcess | None":
        task = self._start_task
        return task.result() if task is not None and task.done() and task.exception() is None else None


class _RewardProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit_s: float,
    ) -> None:
        self._process = process
        self._writer = writer
        self._limit_s = limit_s
        self._open: dict[int, asyncio.Future[ScoreReply]] = {}  # by number
        self._num_requests = 0
        self._is_ready = self._is_stopping = False
        self._hang_timer: asyncio.TimerHandle | None = None
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._pidfd = os.pidfd_open(process.pid)
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, settings: RewardSettings) -> "_RewardProcess":
        """Raises RewardFailure."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arguments = ("-m", "tasks.rewards.reward_worker", msgspec.json.encode(settings).decode())
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bus.process.parent_death", sys.executable, *arguments),
                *("--socket", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},
            )
        except OSError as error:
            ours.close()
            raise RewardFailure(f"cannot start the process of the reward functions: {error.strerror}") from None
        finally:
            theirs.close()
        return cls(process, *await asyncio.open_connection(sock=ours), settings.time_limit_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._reading.done()

    async def request(self, submission: AnswerSubmitted) -> ScoreReply:
        """Raises RewardProcessDied."""
        self._num_requests += 1
        number = self._num_requests
        reply = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(encode_with_length(ScoreRequest(number, submission)))
            if self._hang_timer is None:
                self._restart_hang_timer()
            with contextlib.suppress(ConnectionError):  # its end is reported below
                await self._writer.drain()
            if not self.is_alive:
                raise RewardProcessDied("the process of the reward functions died")
            return await reply
        finally:
            self._open.pop(number, None)

    async def stop(self) -> None:
        self._is_stopping = True
        self._cancel_hang_timer()
        self._writer.close()
        self._kill()
        await self._reading

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the process closes its end."""
        decoder = msgspec.msgpack.Decoder(ScoreReply)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                self._on_reply(decoder.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            self._kill()  # it may have closed or damaged its socket
            exit_code = await self._process.wait()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._cancel_hang_timer()
        if not self._is_stopping:
            structlog.get_logger().error("rewards.process_died", exit_code=exit_code, calls=len(self._open))
        for reply in self._open.values():
            if not reply.done():
                cause = f"the process of the reward functions died with exit code {exit_code}"
                reply.set_exception(RewardProcessDied(cause))

    def _on_reply(self, reply: ScoreReply) -> None:
        self._is_ready = True
        waiting = self._open.pop(reply.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)
        self._restart_hang_timer()

    def _restart_hang_timer(self) -> None:
        self._cancel_hang_timer()
        if self._open:
            limit_s = self._limit_s + _HANG_S + (0.0 if self._is_ready else _START_LIMIT_S)
            self._hang_timer = asyncio.get_running_loop().call_later(limit_s, self._on_hang)

    def _on_hang(self) -> None:
        self._hang_timer = None
        if self._open and self.is_alive:  # else its calls were cancelled
            structlog.get_logger().error("rewards.process_hangs", calls=len(self._open))
            self._kill()

    def _kill(self) -> None:
        """Unlike asyncio's kill, it leaves the exit code of a process that has just ended to asyncio."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _cancel_hang_timer(self) -> None:
        if self._hang_timer is not None:
            self._hang_timer.cancel()
            self._hang_timer = None
