"""One container as the executor sees it: its keeper's connection, and the processes that it started there."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
from collections.abc import Callable
from typing import cast

from sandbox.contract import SandboxFailure
from sandbox.inside.frames import BrokenStream, Frame, FrameReader, encode
from sandbox.inside.settings import Settings

_CONNECT_S = 30.0  # for a process in the container to start and to connect
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


class ContainerProcess:
    """Implements sandbox.host.Launched."""

    def __init__(self, container: Container, token: str) -> None:
        self._container = container
        self._token = token
        self._ended = asyncio.Event()
        self._connected: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    @property
    def socket(self) -> socket.socket:
        return self._connected.result()

    @property
    def pid(self) -> int:
        return peer_pid(self.socket)

    def kill(self) -> None:
        self._container.send({"op": "kill", "token": self._token})

    async def ended(self) -> None:
        await self._ended.wait()

    async def connected(self) -> None:
        """Raises SandboxFailure if it ends first, or takes too long."""
        try:
            await asyncio.wait_for(self._connected, _CONNECT_S)
        except TimeoutError:
            self.kill()
            raise SandboxFailure("a process in the container did not connect") from None

    def take_connection(self, connection: socket.socket) -> None:
        if self._connected.done():
            connection.close()
        else:
            self._connected.set_result(connection)

    def note_end(self) -> None:
        self._ended.set()
        if not self._connected.done():
            self._connected.set_exception(SandboxFailure("a process in the container ended while it started"))
            self._connected.exception()  # nobody may be waiting


class Container(asyncio.Protocol):
    """From its keeper's first word to the end of the keeper's connection, which is the container's end."""

    def __init__(self, container_id: str, on_end: Callable[[Container], None]) -> None:
        self.id = container_id
        self.pid = 0  # of its keeper, as this machine numbers it
        self.alive = False
        self.memory_share = 0.0
        self.asked = 0  # for its memory, since the keeper's last word
        self.processes: dict[str, ContainerProcess] = {}
        self._on_end = on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    async def attach(self, connection: socket.socket) -> None:
        self.pid = peer_pid(connection)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    async def launch(self, module: str, settings: Settings) -> ContainerProcess:
        token = secrets.token_hex(16)
        process = self.processes[token] = ContainerProcess(self, token)
        self.send({"op": "start", "token": token, "module": module, "settings": settings.to_json()})
        await process.connected()
        return process

    def send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(encode(frame))

    def ask_for_memory(self) -> None:
        self.asked += 1
        self.send({"op": "memory"})

    def give_up(self) -> None:
        """Nobody reads at the other end."""
        if self._transport is not None:
            self._transport.abort()

    def let_go(self) -> None:
        """The keeper ends when its connection does, and the container with it."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self.alive = True

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except BrokenStream:
            self.let_go()
            return
        self.asked = 0
        for frame in frames:
            if "ended" in frame:
                self._end_of(frame["ended"])
            elif frame["limit"]:
                self.memory_share = frame["used"] / frame["limit"]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.alive = False
        for token in list(self.processes):
            self._end_of(token)
        self._on_end(self)

    def _end_of(self, token: str) -> None:
        process = self.processes.pop(token, None)
        if process is not None:
            process.note_end()


def peer_pid(connection: socket.socket) -> int:
    """Of the process that made the connection, as this machine numbers it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[0]
