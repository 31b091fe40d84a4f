"""The fork servers of one flavour: who is free, who waits, and a new one in place of one that died.

A fork server runs `RUNNING_PER_SERVER` calls side by side: enough to keep its core busy, and few enough that each is soon
done. Calls that sleep or never end would hold those slots. So while others wait, a call is long, and holds a slot of
another kind, once `_OVERTAKEN` calls have been answered since it began, or once its server has answered none for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable
from typing import NamedTuple

import structlog

from sandbox.contract import SandboxFailure
from sandbox.host import Host
from sandbox.inside.frames import Frame
from sandbox.inside.settings import Settings
from sandbox.server_process import ServerProcess

RUNNING_PER_SERVER = 64  # calls side by side on one fork server; the next ones wait in their order
MOST_PER_SERVER = 512  # with the long ones
_OVERTAKEN = 2 * RUNNING_PER_SERVER
_LOOK_S = 0.25  # between two looks for long calls
_RESTARTS = 5  # failures in a row of one server and its successors: then those who wait for a pool without any fail
_RESTART_PAUSE_S = 0.05  # doubled each time
_LONGEST_PAUSE_S = 5.0
_MODULE = "sandbox.inside.boot"
_PING_S = 10.0  # between two questions whether a server with calls still answers
_PINGS = 6  # without an answer: the server is stopped, or hangs; it is ended, and another takes its place
_PING = 0  # no call has this number
DIED = "fork server died"


class _UnderWay(NamedTuple):
    answer: asyncio.Future[Frame]
    answered_before: int  # calls that its server had answered when it began


class ForkServerLink:
    """One fork server. Every call that is sent to it ends once: with its answer, or with SandboxFailure."""

    def __init__(self, pool: ServerPool, failures: int = 0) -> None:
        self._pool = pool
        self.failures = failures  # of it and of those whose place it takes, in a row without an answer
        self._calls: dict[int, _UnderWay] = {}
        self._process = ServerProcess(pool.host, _MODULE, self._on_frame, self._on_end)
        self.alive = False
        self.running = 0  # slots taken
        self.pinned: deque[asyncio.Future[None]] = deque()  # waiting for a slot of this very server
        self._long: set[int] = set()  # calls under way that hold no slot from the others
        self._answered = 0
        self._answered_at_look = 0
        self._silent_looks = 0
        self._unanswered_pings = 0
        self._next_ping: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def has_room(self) -> bool:
        return self.running < min(RUNNING_PER_SERVER + len(self._long), MOST_PER_SERVER)

    def look_for_long_calls(self) -> None:
        """A silent server is not at once one whose calls are all long: the more there are, the longer must it be silent."""
        self._silent_looks = self._silent_looks + 1 if self._answered == self._answered_at_look else 0
        self._answered_at_look = self._answered
        has_stalled = self._silent_looks > len(self._long) // RUNNING_PER_SERVER
        if has_stalled:
            self._silent_looks = 0
        for number, call in self._calls.items():
            if has_stalled or self._answered - call.answered_before >= _OVERTAKEN:
                self._long.add(number)

    async def start(self, settings: Settings) -> Frame:
        greeting = await self._process.start(settings)
        self.alive = True
        return greeting

    async def call(self, frame: Frame) -> Frame:
        """Raises SandboxFailure if the server dies first. Cancelled: the call's process is ended."""
        if not self.alive:
            raise SandboxFailure(DIED)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[frame["id"]] = _UnderWay(answer, self._answered)
        self._process.send(frame)
        if self._next_ping is None:
            self._ping_later()
        try:
            return await answer
        except asyncio.CancelledError:
            self._process.send({"op": "kill", "id": frame["id"]})
            raise
        finally:
            self._calls.pop(frame["id"], None)
            self._long.discard(frame["id"])

    def end_session(self, session: int) -> None:
        if self.alive:
            self._process.send({"op": "end", "session": session})

    async def stop(self) -> None:
        self.alive = False
        self._stop_pings()
        await self._process.stop()

    def _ping_later(self) -> None:
        self._next_ping = asyncio.get_running_loop().call_later(_PING_S, self._ping)

    def _ping(self) -> None:
        self._next_ping = None
        if not self._calls:  # the next call asks again
            return
        if self._unanswered_pings >= _PINGS:
            structlog.get_logger().error("fork_server.silent", pid=self.pid, calls=len(self._calls))
            self._process.give_up()
            return
        self._unanswered_pings += 1
        self._process.send({"op": "ping", "id": _PING})
        self._ping_later()

    def _stop_pings(self) -> None:
        if self._next_ping is not None:
            self._next_ping.cancel()

    def _on_frame(self, frame: Frame) -> None:
        self._unanswered_pings = 0
        if frame["id"] == _PING:
            return
        self.failures = 0
        self._answered += 1
        call = self._calls.pop(frame["id"], None)
        if call is not None and not call.answer.done():
            call.answer.set_result(frame)

    def _on_end(self) -> None:
        self.alive = False
        self._stop_pings()
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(SandboxFailure(DIED))
        self._calls.clear()
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
        self._hopeless = False  # no server lives, and one could not be started for a while; it is tried all the same
        self._closing = asyncio.Event()
        self._restarts: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers if server.pid is not None]

    async def start(self) -> list[Frame]:
        """The servers' greetings; started once, also when many ask. Raises SandboxFailure."""
        if self._started:  # one that dies is replaced by `_replace`
            return []
        async with self._starting:
            if self._started:
                return []
            servers = [ForkServerLink(self) for _ in range(self._size)]
            try:
                greetings = await _all(*[server.start(self._settings) for server in servers])
                if self._closing.is_set():
                    raise SandboxFailure("the sandbox is closing")
            except BaseException:  # also those that have greeted: nobody else knows of them
                await asyncio.gather(*[server.stop() for server in servers])
                raise
            self._servers, self._started = servers, True
            for dead in [server for server in servers if not server.alive]:  # while others were still starting
                self.lost(dead)
            return greetings

    async def take(self, server: ForkServerLink | None = None) -> ForkServerLink:
        """A slot, of `server` if it is given. Raises SandboxFailure when that server or the whole pool has died."""
        if server is not None:
            return await self._take_pinned(server)
        free = self._least_busy()
        if free is None:
            if self._hopeless or self._closing.is_set():
                raise SandboxFailure("no fork server can be started")
            waiter: asyncio.Future[ForkServerLink] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            self._look_later()
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
        if not server.has_room:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            server.pinned.append(waiter)
            self._look_later()
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
        if server.alive:
            self._hand_out(server)

    def _hand_out(self, server: ForkServerLink) -> None:
        """Its free slots, to those who wait for it and then to those who wait for any."""
        while server.has_room:
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

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        for server in self._servers:
            server.look_for_long_calls()
            if server.alive:
                self._hand_out(server)
        if self._waiting or any(server.pinned for server in self._servers):
            self._look_later()

    def lost(self, server: ForkServerLink) -> None:
        """A server has ended: those who wait for it fail, those who wait for any wait for its successor."""
        for pinned in server.pinned:
            if not pinned.done():
                pinned.set_exception(SandboxFailure(DIED))
        server.pinned.clear()
        if self._closing.is_set() or server not in self._servers:
            return
        self._servers.remove(server)
        task = asyncio.get_running_loop().create_task(self._replace(server))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def close(self) -> None:
        self._closing.set()
        if self._next_look is not None:
            self._next_look.cancel()
        await asyncio.gather(*self._restarts)
        self._fail_waiting("the sandbox is closing")
        await asyncio.gather(*[server.stop() for server in self._servers])

    async def _replace(self, dead: ForkServerLink) -> None:
        await dead.stop()
        failures = dead.failures + 1
        while not await self._closes_within(min(_RESTART_PAUSE_S * 2 ** min(failures, 16), _LONGEST_PAUSE_S)):
            server = ForkServerLink(self, failures)
            try:
                await self._start_unless_closing(server)
            except SandboxFailure:
                failures += 1
                if failures > _RESTARTS and not self._servers:
                    self._hopeless = True
                    self._fail_waiting("no fork server can be started")
                continue
            self._hopeless = False
            self._servers.append(server)
            server.running += 1
            self.give_back(server)
            return

    async def _start_unless_closing(self, server: ForkServerLink) -> None:
        """A start may wait for a container for long; closing does not wait with it. Raises SandboxFailure."""
        starting = asyncio.ensure_future(server.start(self._settings))
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait((starting, closing), return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise SandboxFailure("the sandbox is closing")
        await starting
        if not server.alive:  # it has died since it greeted
            await server.stop()
            raise SandboxFailure(DIED)

    async def _closes_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    def _fail_waiting(self, cause: str) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(SandboxFailure(cause))

    def _least_busy(self) -> ForkServerLink | None:
        free = [server for server in self._servers if server.alive and server.has_room]
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
