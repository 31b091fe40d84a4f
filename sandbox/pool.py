"""The fork servers of one flavour: who is free, who waits, and a new one in place of one that died."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable

from sandbox.contract import SandboxFailure
from sandbox.host import Host
from sandbox.inside.frames import Frame
from sandbox.inside.settings import Settings
from sandbox.server_process import ServerProcess

RUNNING_PER_SERVER = 128  # calls side by side on one fork server; the next ones wait in their order
_RESTARTS = 5  # in a row without an answer in between: then the pool gives up
_RESTART_PAUSE_S = 0.05  # doubled each time
_MODULE = "sandbox.inside.boot"
DIED = "fork server died"


class ForkServerLink:
    """One fork server. Every call that is sent to it ends once: with its answer, or with SandboxFailure."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._process = ServerProcess(pool.host, _MODULE, self._on_frame, self._on_end)
        self.alive = False
        self.running = 0  # slots taken
        self.pinned: deque[asyncio.Future[None]] = deque()  # waiting for a slot of this very server

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def start(self, settings: Settings) -> Frame:
        greeting = await self._process.start(settings)
        self.alive = True
        return greeting

    async def call(self, frame: Frame) -> Frame:
        """Raises SandboxFailure if the server dies first. Cancelled: the call's process is ended."""
        if not self.alive:
            raise SandboxFailure(DIED)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[frame["id"]] = answer
        self._process.send(frame)
        try:
            return await answer
        except asyncio.CancelledError:
            self._process.send({"op": "kill", "id": frame["id"]})
            raise
        finally:
            self._answers.pop(frame["id"], None)

    def end_session(self, session: int) -> None:
        if self.alive:
            self._process.send({"op": "end", "session": session})

    async def stop(self) -> None:
        self.alive = False
        await self._process.stop()

    def _on_frame(self, frame: Frame) -> None:
        self._pool.answered()
        answer = self._answers.pop(frame["id"], None)
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def _on_end(self) -> None:
        self.alive = False
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxFailure(DIED))
        self._answers.clear()
        self._pool.lost(self)


class ServerPool:
    """Hands out slots, first come first served: to the least busy server, or to the one that holds a session."""

    def __init__(self, host: Host, settings: Settings, size: int) -> None:
        self.host = host
        self._settings = settings
        self._size = size
        self._servers: list[ForkServerLink] = []
        self._started = False
        self._waiting: deque[asyncio.Future[ForkServerLink]] = deque()
        self._failures = 0
        self._closing = asyncio.Event()
        self._restarts: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()

    @property
    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers if server.pid is not None]

    async def start(self) -> list[Frame]:
        """The servers' greetings; started once, also when many ask. Raises SandboxFailure."""
        async with self._starting:
            if self._started:  # one that dies is replaced by `_replace`
                return []
            servers = [ForkServerLink(self) for _ in range(self._size)]
            try:
                greetings = await _all(*[server.start(self._settings) for server in servers])
            except SandboxFailure:
                await asyncio.gather(*[server.stop() for server in servers])
                raise
            self._servers, self._started = servers, True
            return greetings

    async def take(self, server: ForkServerLink | None = None) -> ForkServerLink:
        """A slot, of `server` if it is given. Raises SandboxFailure when that server or the whole pool has died."""
        if server is not None:
            return await self._take_pinned(server)
        free = self._least_busy()
        if free is None:
            if self._failures > _RESTARTS or self._closing.is_set():
                raise SandboxFailure("no fork server can be started")
            waiter: asyncio.Future[ForkServerLink] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                return await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self.give_back(waiter.result())
                raise
        free.running += 1
        return free

    async def _take_pinned(self, server: ForkServerLink) -> ForkServerLink:
        if not server.alive:
            raise SandboxFailure(DIED)
        if server.running >= RUNNING_PER_SERVER:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            server.pinned.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self.give_back(server)
                raise
            return server
        server.running += 1
        return server

    def give_back(self, server: ForkServerLink) -> None:
        server.running -= 1
        if not server.alive:
            return
        while server.running < RUNNING_PER_SERVER:
            if server.pinned:
                pinned = server.pinned.popleft()
                if not pinned.done():
                    server.running += 1
                    pinned.set_result(None)
            elif self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.done():
                    server.running += 1
                    waiter.set_result(server)
            else:
                return

    def answered(self) -> None:
        self._failures = 0

    def lost(self, server: ForkServerLink) -> None:
        """A server has ended: those who wait for it fail, those who wait for any wait for its successor."""
        for pinned in server.pinned:
            if not pinned.done():
                pinned.set_exception(SandboxFailure(DIED))
        server.pinned.clear()
        if self._closing.is_set() or server not in self._servers:
            return
        self._servers.remove(server)
        self._failures += 1
        task = asyncio.get_running_loop().create_task(self._replace(server))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def close(self) -> None:
        self._closing.set()
        await asyncio.gather(*self._restarts)
        self._fail_waiting("the sandbox is closing")
        await asyncio.gather(*[server.stop() for server in self._servers])

    async def _replace(self, dead: ForkServerLink) -> None:
        await dead.stop()
        while self._failures <= _RESTARTS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _RESTART_PAUSE_S * 2**self._failures)
            if self._closing.is_set():
                return
            server = ForkServerLink(self)
            try:
                await server.start(self._settings)
            except SandboxFailure:
                self._failures += 1
                continue
            self._servers.append(server)
            server.running += 1
            self.give_back(server)
            return
        if not self._servers:
            self._fail_waiting("no fork server can be started")

    def _fail_waiting(self, cause: str) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(SandboxFailure(cause))

    def _least_busy(self) -> ForkServerLink | None:
        free = [server for server in self._servers if server.alive and server.running < RUNNING_PER_SERVER]
        return min(free, key=lambda server: server.running, default=None)


async def _all(*starts: Awaitable[Frame]) -> list[Frame]:
    """All that they return, once all have ended; raises the first error among them."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    frames: list[Frame] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        frames.append(result)
    return frames
