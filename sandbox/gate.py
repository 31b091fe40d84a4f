"""The socket to which the processes of containers connect: each says first which one it is."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import structlog

from sandbox.contract import SandboxFailure
from sandbox.inside.frames import LENGTH, BrokenStream, Frame, FrameReader
from sandbox.owner import is_gone, owner_mark

_PREFIX = "asterism-docker-"
_OWNER = "owner"  # a file in the folder
_NAME = "executor.sock"
_FIRST_FRAME_S = 10.0
_FIRST_FRAME_BYTES = 4096
_BACKLOG = 256
_MOST_ARRIVALS = 1024  # that have not said yet who they are; more come only from who means harm
_PAUSE_S = 0.1  # before it accepts again when the system could not


class Gate:
    """`on_arrival(first frame, connection)` answers whether it takes the connection; else it is closed."""

    def __init__(self, on_arrival: Callable[[Frame, socket.socket], bool]) -> None:
        self._on_arrival = on_arrival
        self._arrivals: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.folder = Path()
        self._logger = structlog.get_logger()

    def open(self) -> None:
        """In a folder of its own; those that executors before it have left are removed. Raises SandboxFailure."""
        try:
            _sweep()
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            (self.folder / _OWNER).write_text(owner_mark())
            self.folder.chmod(0o711)  # the container's user enters it; nobody lists it
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            self._listener.bind(str(self.folder / _NAME))
            (self.folder / _NAME).chmod(0o666)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise SandboxFailure(f"cannot make a socket in {tempfile.gettempdir()}: {error.strerror}") from error
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def close(self) -> None:
        tasks = [task for task in (self._accepting, *self._arrivals) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or gone before it was accepted
                self._logger.error("connection.not_accepted", cause=error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._arrivals) >= _MOST_ARRIVALS:
                connection.close()
                continue
            connection.setblocking(False)
            task = loop.create_task(self._welcome(connection))
            self._arrivals.add(task)
            task.add_done_callback(self._arrivals.discard)

    async def _welcome(self, connection: socket.socket) -> None:
        taken = False
        try:
            frame = await asyncio.wait_for(_first_frame(connection), _FIRST_FRAME_S)
            taken = self._on_arrival(frame, connection)
        except (OSError, ValueError, TimeoutError, BrokenStream):
            pass  # whoever it was has gone, or is none of ours
        finally:
            if not taken:
                connection.close()


async def _first_frame(connection: socket.socket) -> Frame:
    """No byte more than it is read: the connection is another's afterwards."""
    header = await _exactly(connection, LENGTH.size)
    (length,) = LENGTH.unpack(header)
    if length > _FIRST_FRAME_BYTES:
        raise ValueError("a first frame that is none")
    (frame,) = FrameReader().feed(header + await _exactly(connection, length))
    return frame


async def _exactly(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        chunk = await asyncio.get_running_loop().sock_recv(connection, length - len(received))
        if not chunk:
            raise ConnectionResetError
        received += chunk
    return received


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            left = is_gone((folder / _OWNER).read_text())
        except OSError:
            continue  # another user's, or just being made
        if left:
            shutil.rmtree(folder, ignore_errors=True)
