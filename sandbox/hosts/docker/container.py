"""Controls one container through its init process: launches processes and polls memory use."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Callable
from typing import cast

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.cgroup_folders import CgroupFolder
from asterism.sandbox.hosts.user_maps import answer_map_request, may_map_users, offer_users
from asterism.sandbox.inside.isolation.kernel_users import get_first_user
from asterism.sandbox.inside.wire.frames import BrokenStream, Frame, FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings

_CONNECT_TIMEOUT_S = 30.0  # time for a process in the container to start and connect
_CGROUP_NAME = "calls"  # folder that the engine removes with the cgroup of the container
_CREDENTIALS = struct.Struct("3i")  # pid, user, group


class ContainerProcess:
    """Implements asterism.sandbox.hosts.host.LaunchedProcess."""

    def __init__(self, container: Container, token: str) -> None:
        self._container = container
        self._token = token
        self._exited = asyncio.Event()
        self._connection: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    @property
    def socket(self) -> socket.socket:
        return self._connection.result()

    @property
    def pid(self) -> int:
        return _get_peer(self.socket)[0]

    def kill(self) -> None:
        self._container.send({"op": "kill", "token": self._token})

    async def wait(self) -> None:
        await self._exited.wait()

    async def wait_connected(self) -> None:
        """Wait for the connection. Raises SandboxFailure if the process exits first, or on timeout."""
        try:
            await asyncio.wait_for(self._connection, _CONNECT_TIMEOUT_S)
        except TimeoutError:
            self.kill()
            raise SandboxFailure("a process in the container did not connect") from None

    def set_connection(self, connection: socket.socket) -> None:
        if self._connection.done():
            connection.close()
        else:
            self._connection.set_result(connection)

    def mark_exited(self) -> None:
        self._exited.set()
        if not self._connection.done():
            self._connection.set_exception(SandboxFailure("a process in the container exited while it started"))
            self._connection.exception()  # marks the exception as retrieved, because no task might wait for it


class Container(asyncio.Protocol):
    """A container, which ends with the connection to its init process."""

    def __init__(self, container_id: str, on_end: Callable[[Container], None]) -> None:
        self.id = container_id
        self.pid = 0  # pid of the init process, in this machine's pid namespace
        self.alive = False
        self.memory_used = self.memory_limit = 0  # bytes
        self.unanswered_requests = 0  # memory requests since the last frame from the init process
        self.processes: dict[str, ContainerProcess] = {}
        self._cgroups: CgroupFolder | None = None
        self._on_end = on_end
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    async def attach(self, connection: socket.socket) -> None:
        self.pid, _ = _get_peer(connection)
        with contextlib.suppress(OSError):  # without permission, the fork servers measure memory
            self._cgroups = CgroupFolder(self.pid, _CGROUP_NAME, may_move=True)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    async def launch(self, module: str, settings: ServerSettings) -> ContainerProcess:
        use_cgroups = self._cgroups is not None and settings.preload != "grader"
        use_users = settings.namespaces and settings.preload != "grader" and may_map_users(self.pid)
        settings = settings._replace(kernel_users=use_users, call_cgroups=use_cgroups)
        token = secrets.token_hex(16)
        process = self.processes[token] = ContainerProcess(self, token)
        self.send({"op": "start", "token": token, "module": module, "settings": settings.to_json()})
        await process.wait_connected()
        pid, user = _get_peer(process.socket)
        if use_users:
            offer_users(process.socket, pid)
        if self._cgroups is not None and use_cgroups:
            self._cgroups.hand_over(pid, get_first_user(pid) if use_users else user, process.socket)
        if use_users:
            try:
                await answer_map_request(process.socket, pid)
            except BaseException:  # cancelled: no other object refers to the process
                process.socket.close()
                process.kill()
                raise
        return process

    def send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(frame))

    def request_memory_use(self) -> None:
        self.unanswered_requests += 1
        self.send({"op": "memory"})

    def abort(self) -> None:
        """Drop the connection and its unsent data: the init process no longer reads."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection: the init process exits, and the container ends."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from asyncio.Transport
        self.alive = True

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._reader.feed(data)
        except BrokenStream:
            self.close()
            return
        self.unanswered_requests = 0
        for frame in frames:
            if "ended" in frame:
                self._on_process_exit(frame["ended"])
            elif frame["limit"]:
                self.memory_used, self.memory_limit = frame["used"], frame["limit"]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.alive = False
        for token in list(self.processes):
            self._on_process_exit(token)
        self._on_end(self)

    def _on_process_exit(self, token: str) -> None:
        process = self.processes.pop(token, None)
        if process is not None:
            process.mark_exited()


def _get_peer(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, user) of the connecting process, in this machine's namespaces."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user
