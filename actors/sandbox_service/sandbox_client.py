"""The client uses a sandbox that `asterism sandbox serve` runs in another process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from asterism.bus.addresses import EXECUTOR
from asterism.bus.codec import MalformedFrame, encode
from asterism.bus.lanes import LANES
from asterism.bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    Envelope,
    SessionEnded,
    SessionRestored,
)
from asterism.bus.process.scratch_lock import name_scratch
from asterism.bus.process.waiting import cancel_tasks
from asterism.bus.transport.zeromq import get_socket_path, open_zmq_bus
from asterism.configs.errors import UnusableInput
from asterism.policies.rollout.call_transitions import keeps_effects
from asterism.sandbox.contract import CodeResult, Grade, SandboxFailure

SERVED_ADDRESS = EXECUTOR  # bus address of a served sandbox
MAX_REQUEST_BYTES = 16 << 20  # limit of an encoded message: more than the sandbox accepts of code and input
_QUEUE_MESSAGES = 65_536
_GRADING_CALL = -1
_POLL_INTERVAL_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_SERVER_ENDED = "the sandbox server has ended"


def get_default_folder(environ: Mapping[str, str]) -> Path:
    """Return a folder in which other users cannot create files first, if the system provides one."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime, "asterism-sandbox")
    return Path(tempfile.gettempdir(), name_scratch("served"))


def check_private_folder(folder: Path) -> None:
    """Check that no other user can take the place of client or server in the folder. Raises UnusableInput."""
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise UnusableInput(f"--at {folder}: the folder of another user; choose your own folder")
    if status.st_mode & 0o077:
        raise UnusableInput(
            f"--at {folder}: other users have access to it; run `chmod 700 {folder}`, or choose another"
        )


def is_listening(path: Path) -> bool:
    """Return whether a process of this user listens on the Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # the socket's queue of connections is full
            return True
        except OSError:
            return False
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return _CREDENTIALS.unpack(credentials)[1] == os.getuid()


def is_served(folder: Path) -> bool:
    return is_listening(get_socket_path(folder, SERVED_ADDRESS))


class SandboxClient:
    """A context manager that uses the sandbox served in `folder`. Implements asterism.sandbox.contract.CodeSandbox."""

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            check_private_folder(folder)
        if not is_served(folder):
            raise UnusableInput(
                f"--at {folder}: no sandbox is served there; start one with `asterism sandbox serve --at {folder}`"
            )
        self._name = f"client-{os.getpid()}"
        epoch = time.time_ns()  # an earlier client may have had the same process id and name
        self._bus = open_zmq_bus(self._name, folder, _QUEUE_MESSAGES, epoch)
        self._pending: dict[tuple[int, int], asyncio.Future[CodeResult | Grade]] = {}
        self._cells: dict[int, list[CodeRequested]] = {}  # cells with effects, by trajectory
        self._unsent: set[int] = set()  # trajectories with cells that the server does not have
        self._folder = folder
        loop = asyncio.get_running_loop()
        self._receive_task, self._watch_task = loop.create_task(self._receive()), loop.create_task(self._watch_server())

    async def __aenter__(self) -> SandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cancel_tasks(self._receive_task, self._watch_task)
        await self._bus.close()
        for lane in LANES:
            get_socket_path(self._folder, self._name, lane).unlink(missing_ok=True)

    async def run(self, call: CodeRequested) -> CodeResult:
        """Run the call. Raises SandboxFailure. Cancellation stops all calls of the trajectory."""
        if call.trajectory_id in self._unsent:
            await self._send_cells(call.trajectory_id)
        try:
            result = await self._request((call.trajectory_id, call.call), call)
        except asyncio.CancelledError:
            await self._stop_calls(call.trajectory_id)
            raise
        assert isinstance(result, CodeResult)
        if call.tool == "jupyter_code" and keeps_effects(result.outcome):
            self._cells.setdefault(call.trajectory_id, []).append(call)
        return result

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        """Grade the answer. Raises SandboxFailure."""
        grade = await self._request((submission.trajectory_id, _GRADING_CALL), submission)
        assert isinstance(grade, Grade)
        return grade

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        self._cells[trajectory_id] = list(cells)
        self._unsent.add(trajectory_id)

    async def end_notebook(self, trajectory_id: int) -> None:
        self._unsent.discard(trajectory_id)
        self._cells.pop(trajectory_id, None)
        await self._bus.send(SERVED_ADDRESS, SessionEnded(trajectory_id))

    async def _stop_calls(self, trajectory_id: int) -> None:
        """End the notebook, which is built again from its cells before its next call."""
        await self._bus.send(SERVED_ADDRESS, SessionEnded(trajectory_id))
        await self._send_cells(trajectory_id)

    async def _send_cells(self, trajectory_id: int) -> None:
        self._unsent.discard(trajectory_id)
        if cells := self._cells.get(trajectory_id):
            await self._bus.send(SERVED_ADDRESS, SessionRestored(trajectory_id, tuple(cells)))

    async def _request(self, key: tuple[int, int], message: CodeRequested | AnswerSubmitted) -> CodeResult | Grade:
        if self._watch_task.done():
            raise SandboxFailure(_SERVER_ENDED)
        if key in self._pending:
            raise ValueError(f"trajectory {key[0]}: the same request is already in flight")
        frame = encode(Envelope(self._name, SERVED_ADDRESS, message))
        if len(frame) > MAX_REQUEST_BYTES:
            raise SandboxFailure(f"a request of {len(frame)} bytes; the server accepts at most {MAX_REQUEST_BYTES}")
        answer = self._pending[key] = asyncio.get_running_loop().create_future()
        try:
            await self._bus.send_frame(SERVED_ADDRESS, frame)
            return await answer
        finally:
            del self._pending[key]

    async def _watch_server(self) -> None:
        """Wait until the server has ended, then fail all pending requests."""
        while is_served(self._folder):  # noqa: ASYNC110 - no event announces the server's end
            await asyncio.sleep(_POLL_INTERVAL_S)
        for key in list(self._pending):
            self._resolve(key, SandboxFailure(_SERVER_ENDED))

    async def _receive(self) -> None:
        """Receive results, and drop malformed frames, which a sandbox never sends."""
        while True:
            with contextlib.suppress(MalformedFrame):
                await self._receive_one()

    async def _receive_one(self) -> None:
        match (await self._bus.receive()).message:
            case CodeFinished(trajectory_id=trajectory, call=call, outcome=outcome, duration_s=duration_s):
                self._resolve((trajectory, call), CodeResult(outcome, duration_s))
            case AnswerGraded(trajectory_id=trajectory, reward=reward, duration_s=duration_s):
                self._resolve((trajectory, _GRADING_CALL), Grade(reward > 0, duration_s))
            case CallFailed(trajectory_id=trajectory, call=call, cause=cause):
                self._resolve((trajectory, call), SandboxFailure(cause))
            case _:
                pass  # the message is for rollout processes only

    def _resolve(self, key: tuple[int, int], result: CodeResult | Grade | SandboxFailure) -> None:
        waiting = self._pending.get(key)
        if waiting is None or waiting.done():
            return
        if isinstance(result, SandboxFailure):
            waiting.set_exception(result)
        else:
            waiting.set_result(result)
