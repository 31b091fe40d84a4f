"""Assigns the slots of the fork servers of one preload, and replaces servers that exit."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable

from asterism.bus.process.waiting import cancel_tasks, start_task
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.host import Host
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.pool.fork_server_client import SERVER_DIED, ForkServerClient, fail_waiters

_LONG_CALL_CHECK_S = 0.25  # interval of the checks while requests wait for a slot
# Consecutive failures of a server and its successors, after which requests to an empty pool fail.
_MAX_FAILED_RESTARTS = 5
_RESTART_BACKOFF_S = 0.05  # doubled after each failure
_MAX_RESTART_BACKOFF_S = 5.0
_CLOSING = "the sandbox is closing"
_CANNOT_START = "no fork server can be started"


class ServerPool:
    """A pool that assigns slots of the least busy server or of a given one, first come, first served."""

    def __init__(self, host: Host, settings: ServerSettings, size: int) -> None:
        self._host = host
        self._settings = settings
        self._size = size
        self._servers: list[ForkServerClient] = []
        self._started = False
        self._waiters: deque[asyncio.Future[ForkServerClient]] = deque()
        self._cannot_start = False  # no server runs and restarts have failed; more restarts follow
        self._closing = asyncio.Event()
        self._restart_tasks: set[asyncio.Task[None]] = set()
        self._start_lock = asyncio.Lock()
        self._check_timer: asyncio.TimerHandle | None = None

    @property
    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers if server.pid is not None]

    async def start(self) -> list[Frame]:
        """Start the servers and return their greetings, none after the first start. Raises SandboxFailure."""
        if self._started:  # `_replace` replaces servers that have exited
            return []
        async with self._start_lock:
            if self._started:
                return []
            servers = [ForkServerClient(self._host, self._on_server_lost) for _ in range(self._size)]
            try:
                greetings = await _gather_all(*[server.start(self._settings) for server in servers])
                if self._closing.is_set():
                    raise SandboxFailure(_CLOSING)
            except BaseException:  # all servers are stopped, because no other object refers to them
                await asyncio.gather(*[server.stop() for server in servers])
                raise
            self._servers, self._started = servers, True
            for dead in [server for server in servers if not server.alive]:  # servers that exited while others started
                self._on_server_lost(dead)
            return greetings

    async def acquire(self, pinned: ForkServerClient | None = None) -> ForkServerClient:
        """Take a slot of `pinned`, or of any server. Raises SandboxFailure if no such server can run."""
        if pinned is not None and not pinned.alive:
            raise SandboxFailure(SERVER_DIED)
        server = pinned or self._find_least_busy()
        if server is not None and server.has_free_slot:
            server.slots_in_use += 1
            return server
        if pinned is not None:
            return await self._wait_for_slot(pinned.pinned_waiters)
        if self._cannot_start or self._closing.is_set():
            raise SandboxFailure(_CANNOT_START)
        return await self._wait_for_slot(self._waiters)

    async def _wait_for_slot(self, waiters: deque[asyncio.Future[ForkServerClient]]) -> ForkServerClient:
        waiter: asyncio.Future[ForkServerClient] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        self._schedule_check()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())  # the slot was granted before the cancellation
            raise

    def release(self, server: ForkServerClient) -> None:
        server.slots_in_use -= 1
        if server.alive:
            self._grant_slots(server)

    def _grant_slots(self, server: ForkServerClient) -> None:
        """Grant free slots first to waiters for this server, then to waiters for any server."""
        while server.has_free_slot and (waiters := server.pinned_waiters or self._waiters):
            waiter = waiters.popleft()
            if not waiter.done():
                server.slots_in_use += 1
                waiter.set_result(server)

    def end_spare_notebooks(self, pause_s: float) -> None:
        for server in self._servers:
            server.end_spare_notebooks(pause_s)

    def _schedule_check(self) -> None:
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(_LONG_CALL_CHECK_S, self._check_long_calls)

    def _check_long_calls(self) -> None:
        self._check_timer = None
        for server in self._servers:
            server.mark_long_calls()
            if server.alive:
                self._grant_slots(server)
        if self._waiters or any(server.pinned_waiters for server in self._servers):
            self._schedule_check()

    def _on_server_lost(self, server: ForkServerClient) -> None:
        if self._closing.is_set() or server not in self._servers:
            return
        self._servers.remove(server)
        start_task(self._restart_tasks, self._replace(server))

    async def close(self) -> None:
        self._closing.set()
        if self._check_timer is not None:
            self._check_timer.cancel()
        await asyncio.gather(*self._restart_tasks)
        fail_waiters(self._waiters, _CLOSING)
        await asyncio.gather(*[server.stop() for server in self._servers])

    async def _replace(self, dead: ForkServerClient) -> None:
        await dead.stop()
        failures = dead.failures + 1
        while not await self._wait_closing(min(_RESTART_BACKOFF_S * 2 ** min(failures, 16), _MAX_RESTART_BACKOFF_S)):
            server = ForkServerClient(self._host, self._on_server_lost, failures)
            try:
                await self._start_unless_closing(server)
            except SandboxFailure:
                failures += 1
                if failures > _MAX_FAILED_RESTARTS and not self._servers:
                    self._cannot_start = True
                    fail_waiters(self._waiters, _CANNOT_START)
                continue
            self._cannot_start = False
            self._servers.append(server)
            server.slots_in_use += 1
            self.release(server)
            return

    async def _start_unless_closing(self, server: ForkServerClient) -> None:
        """Start a server. On closing, cancel the start, which can wait for a container. Raises SandboxFailure."""
        starting = asyncio.ensure_future(server.start(self._settings))
        closing = asyncio.ensure_future(self._closing.wait())
        await asyncio.wait((starting, closing), return_when=asyncio.FIRST_COMPLETED)
        closing.cancel()
        if not starting.done():
            await cancel_tasks(starting)
            raise SandboxFailure(_CLOSING)
        await starting
        if not server.alive:  # the server exited after its greeting
            await server.stop()
            raise SandboxFailure(SERVER_DIED)

    async def _wait_closing(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), seconds)
        return self._closing.is_set()

    def _find_least_busy(self) -> ForkServerClient | None:
        free = [server for server in self._servers if server.alive and server.has_free_slot]
        return min(free, key=lambda server: server.slots_in_use, default=None)


async def _gather_all(*starts: Awaitable[Frame]) -> list[Frame]:
    """Return all results after all starts have ended; raise the first error among them."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    frames: list[Frame] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        frames.append(result)
    return frames
