"""Accepts the connections of processes in containers. A process identifies itself in its first frame."""

import asyncio
import secrets
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import structlog

from asterism.bus.process.scratch_lock import holding_scratch, name_owner, name_scratch, remove_stale_scratch
from asterism.bus.process.waiting import cancel_tasks, start_task
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.inside.wire.frames import LENGTH, BrokenStream, Frame, FrameReader

_SOCKET_NAME = "executor.sock"
_HANDSHAKE_TIMEOUT_S = 10.0
_MAX_HANDSHAKE_BYTES = 4096
_BACKLOG = 256
_MAX_PENDING_HANDSHAKES = 1024  # further connections without a first frame count as an attack and are closed
_ACCEPT_RETRY_S = 0.1  # pause after a failed accept


class ConnectionGate:
    """A gate that closes a connection unless `on_connection(first frame, connection)` accepts it."""

    def __init__(self, on_connection: Callable[[Frame, socket.socket], bool]) -> None:
        self._on_connection = on_connection
        self._handshakes: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._accept_task: asyncio.Task[None] | None = None
        self.folder = Path()  # folder of the socket; its parent has mode 0700 against other users
        self.owner = ""  # the name of this gate's scratch folder, for the label of its containers
        self._scratch = ExitStack()
        self._logger = structlog.get_logger()

    def open(self) -> None:
        """Listen in a new folder, and remove the folders of ended owners. Raises SandboxFailure."""
        try:
            remove_stale_scratch()
            name = name_scratch(f"docker-{secrets.token_hex(4)}")
            scratch = self._scratch.enter_context(holding_scratch(Path(tempfile.gettempdir()) / name))
            self.owner = name_owner(scratch)
            self.folder = scratch / "socket"
            self.folder.mkdir()
            self.folder.chmod(0o711)  # the container's user can enter the folder but not list it
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.setblocking(False)
            self._listener.bind(str(self.folder / _SOCKET_NAME))
            (self.folder / _SOCKET_NAME).chmod(0o666)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise SandboxFailure(f"cannot make a socket in {tempfile.gettempdir()}: {error.strerror}") from error
        self._accept_task = asyncio.get_running_loop().create_task(self._accept(self._listener))

    async def close(self) -> None:
        await cancel_tasks(self._accept_task, *self._handshakes)
        if self._listener is not None:
            self._listener.close()
        self._scratch.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # no free descriptor, or the peer disconnected before accept
                self._logger.error("connection.not_accepted", cause=error.strerror)
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._handshakes) >= _MAX_PENDING_HANDSHAKES:
                connection.close()
                continue
            connection.setblocking(False)
            start_task(self._handshakes, self._handle_handshake(connection))

    async def _handle_handshake(self, connection: socket.socket) -> None:
        accepted = False
        try:
            frame = await asyncio.wait_for(_read_first_frame(connection), _HANDSHAKE_TIMEOUT_S)
            accepted = self._on_connection(frame, connection)
        except (OSError, ValueError, TimeoutError, BrokenStream):
            pass  # the peer disconnected, or is not a process of our containers
        finally:
            if not accepted:
                connection.close()


async def _read_first_frame(connection: socket.socket) -> Frame:
    """Return the first frame; read no byte beyond it, because another reader takes over the connection."""
    header = await _read_exactly(connection, LENGTH.size)
    (length,) = LENGTH.unpack(header)
    if length > _MAX_HANDSHAKE_BYTES:
        raise ValueError(f"a first frame of {length} bytes, over {_MAX_HANDSHAKE_BYTES}")
    (frame,) = FrameReader().feed(header + await _read_exactly(connection, length))
    return frame


async def _read_exactly(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        chunk = await asyncio.get_running_loop().sock_recv(connection, length - len(received))
        if not chunk:
            raise ConnectionResetError
        received += chunk
    return received
