"""Tests of slots, pings and restarts of fork servers, with scripted servers."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NoReturn

import pytest

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.inside.wire.frames import Frame, FrameReader, encode_frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.pool import fork_server_client, server_connection, server_pool
from asterism.sandbox.pool.fork_server_client import MAX_CALLS_PER_SERVER, SLOTS_PER_SERVER, ForkServerClient
from asterism.sandbox.pool.server_pool import ServerPool

pytestmark = pytest.mark.real_clock

SETTINGS = ServerSettings("bare", False, (), 1.0, 1, 1, 1, 1)


class ScriptedServer(asyncio.Protocol):
    """A fake of asterism.sandbox.hosts.host.LaunchedProcess.

    The server answers immediately, except to calls with the code "never".
    """

    pid = 1

    def __init__(self) -> None:
        self.socket, self.server_end = socket.socketpair()
        self.running: set[int] = set()
        self.pings = 0
        self.stopped = False
        self._changed = asyncio.Event()
        self._exited = asyncio.Event()
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(encode_frame({"hello": "bare"}))

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            if frame["op"] == "ping":
                self.pings += 1
                if self.stopped:
                    continue
            if frame["op"] == "run" and frame["code"] == "never":
                self.running.add(frame["id"])
            else:
                self.answer(frame["id"])
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._exited.set()

    def answer(self, number: int) -> None:
        self.running.discard(number)
        self._transport.write(encode_frame({"id": number}))

    async def wait_running(self, num_calls: int) -> None:
        """Wait until exactly `num_calls` calls are in flight."""
        while len(self.running) != num_calls:
            self._changed.clear()
            await self._changed.wait()

    async def wait_pings(self, num_pings: int) -> None:
        while self.pings < num_pings:
            self._changed.clear()
            await self._changed.wait()

    def disconnect(self) -> None:
        self._transport.close()

    def kill(self) -> None: ...

    async def wait(self) -> None:
        await self._exited.wait()


class ScriptedHost:
    """A fake of asterism.sandbox.hosts.host.Host. `before_launch` gets the number of each launch, from 1."""

    def __init__(
        self,
        before_launch: Callable[[int], Awaitable[object]] = lambda _: asyncio.sleep(0),
        server_class: type[ScriptedServer] = ScriptedServer,
    ) -> None:
        self.servers: list[ScriptedServer] = []
        self.launches = 0
        self._before_launch, self._server_class = before_launch, server_class

    async def start(self) -> None: ...

    async def launch(self, module: str, settings: ServerSettings) -> ScriptedServer:
        self.launches += 1
        await self._before_launch(self.launches)
        server = self._server_class()
        await asyncio.get_running_loop().create_connection(lambda: server, sock=server.server_end)
        self.servers.append(server)
        return server

    async def wait_until_broken(self) -> NoReturn:
        raise NotImplementedError

    def get_excess_memory(self, share: float) -> int:
        return 0

    def describe(self) -> tuple[str, tuple[str, ...]]:
        return "scripted", ()

    async def close(self) -> None: ...


async def launch_only_one(launch: int) -> None:
    """Block the second launch for ever."""
    if launch == 2:
        await asyncio.Event().wait()


class Caller:
    def __init__(self, pool: ServerPool, server: ScriptedServer) -> None:
        self._pool = pool
        self.server = server
        self._num_calls = 0
        self.client: ForkServerClient

    async def __call__(self, code: str) -> Frame:
        self._num_calls += 1
        frame = {"id": self._num_calls, "op": "run", "code": code}
        self.client = await self._pool.acquire()
        try:
            return await self.client.call(frame)
        finally:
            self._pool.release(self.client)


@asynccontextmanager
async def open_pool(host: ScriptedHost, size: int, *, is_started: bool = True) -> AsyncGenerator[ServerPool]:
    pool = ServerPool(host, SETTINGS, size)
    try:
        async with asyncio.timeout(30):
            if is_started:
                await pool.start()
            yield pool
    finally:
        await pool.close()


@asynccontextmanager
async def open_pool_of_one_server() -> AsyncGenerator[Caller]:
    host = ScriptedHost()
    async with open_pool(host, 1) as pool:
        yield Caller(pool, host.servers[0])


@pytest.fixture
def call() -> AbstractAsyncContextManager[Caller]:
    return open_pool_of_one_server()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "_LONG_CALL_CHECK_S", 0.001)
    monkeypatch.setattr(server_pool, "_RESTART_BACKOFF_S", 0.0)


def start_endless_calls(call: Caller, count: int) -> list[asyncio.Task[Frame]]:
    return [asyncio.create_task(call("never")) for _ in range(count)]


async def stop(tasks: list[asyncio.Task[Frame]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_only_a_server_that_answers_no_pings_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_server_client, "_PING_INTERVAL_S", 0.001)
    async with open_pool_of_one_server() as call:
        endless = asyncio.create_task(call("never"))
        await call.server.wait_pings(50)
        assert not endless.done()
        call.server.stopped = True
        with pytest.raises(SandboxFailure, match="fork server died"):
            await endless
        assert await call("quick") == {"id": 2}


async def test_endless_calls_do_not_block_other_calls(call: Caller):
    endless = start_endless_calls(call, 3 * SLOTS_PER_SERVER)
    await call.server.wait_running(len(endless))
    assert [(await call("quick"))["id"] for _ in range(3)] == [len(endless) + number for number in (1, 2, 3)]
    assert not any(task.done() for task in endless)
    await stop(endless)


@pytest.mark.parametrize(("overtaking", "is_long"), [(2 * SLOTS_PER_SERVER - 1, False), (2 * SLOTS_PER_SERVER, True)])
async def test_an_overtaken_call_frees_its_slot(overtaking: int, is_long: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_pool, "_LONG_CALL_CHECK_S", 1e6)
    async with open_pool_of_one_server() as call:
        endless = start_endless_calls(call, SLOTS_PER_SERVER - 1)
        await call.server.wait_running(len(endless))
        for _ in range(overtaking):
            await call("quick")
        endless += start_endless_calls(call, 1)
        await call.server.wait_running(SLOTS_PER_SERVER)
        assert not call.client.has_free_slot
        call.client.mark_long_calls()
        assert call.client.has_free_slot == is_long
        await stop(endless)


@pytest.mark.slow
async def test_a_server_never_exceeds_its_bound_and_waiting_calls_start_in_order(call: Caller):
    endless = start_endless_calls(call, MAX_CALLS_PER_SERVER + 2)
    await call.server.wait_running(MAX_CALLS_PER_SERVER)
    for _ in range(20):  # gives the pool time to look for long calls
        await asyncio.sleep(0.001)
    assert call.server.running == set(range(1, MAX_CALLS_PER_SERVER + 1))
    call.server.answer(7)
    await call.server.wait_running(MAX_CALLS_PER_SERVER)
    assert MAX_CALLS_PER_SERVER + 1 in call.server.running
    assert MAX_CALLS_PER_SERVER + 2 not in call.server.running
    await stop(endless)


async def test_extra_slots_are_removed_when_their_long_calls_end(call: Caller):
    endless = start_endless_calls(call, 3 * SLOTS_PER_SERVER)
    await call.server.wait_running(len(endless))
    await stop(endless)
    await call.server.wait_running(0)
    again = start_endless_calls(call, SLOTS_PER_SERVER)
    await call.server.wait_running(SLOTS_PER_SERVER)
    assert (await asyncio.gather(*[call("quick") for _ in range(10)]))[-1]["id"] == 4 * SLOTS_PER_SERVER + 10
    await stop(again)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def run_loop_turns(number: int) -> None:
    """Run the event loop so that frames in flight arrive."""
    for _ in range(number):
        await asyncio.sleep(0)


async def call_any(pool: ServerPool) -> Frame:
    server = await pool.acquire()
    try:
        return await server.call({"id": 1, "op": "run", "code": ""})
    finally:
        pool.release(server)


async def test_servers_that_exit_simultaneously_are_all_replaced():
    size = 16
    host = ScriptedHost()
    async with open_pool(host, size) as pool:
        for server in host.servers:
            server.disconnect()
        await wait_until(lambda: len(host.servers) == 2 * size and len(pool.server_pids) == size)
        assert (await call_any(pool))["id"] == 1


async def test_a_server_that_exits_while_others_start_is_replaced():
    async def end_the_first(launch: int) -> None:
        """Start the second server after the greeting and the exit of the first one."""
        if launch == 2:
            await wait_until(lambda: len(host.servers) == 1)
            await run_loop_turns(20)
            host.servers[0].disconnect()
            await host.servers[0].wait()
            await run_loop_turns(20)

    host = ScriptedHost(end_the_first)
    async with open_pool(host, 2) as pool:
        await wait_until(lambda: len(host.servers) == 3 and len(pool.server_pids) == 2)


async def test_calls_fail_while_no_server_can_start_and_succeed_afterwards():
    refuses = False

    async def refuse(_: int) -> None:
        await asyncio.sleep(0)
        if refuses:
            raise SandboxFailure("no container")

    host = ScriptedHost(refuse)
    async with open_pool(host, 1) as pool:
        refuses = True
        host.servers[0].disconnect()
        await host.servers[0].wait()
        with pytest.raises(SandboxFailure):
            while True:
                await call_any(pool)
        with pytest.raises(SandboxFailure, match="no fork server can be started"):
            while True:
                await call_any(pool)
        refuses = False
        await wait_until(lambda: len(pool.server_pids) == 1)
        assert (await call_any(pool))["id"] == 1


async def test_a_cancelled_start_leaves_no_server():
    host = ScriptedHost(launch_only_one)
    async with open_pool(host, 2, is_started=False) as pool:
        starting = asyncio.create_task(pool.start())
        await wait_until(lambda: len(host.servers) == 1)
        await run_loop_turns(20)  # the server's greeting arrives
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await host.servers[0].wait()


async def test_a_server_without_a_greeting_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_connection, "_GREETING_TIMEOUT_S", 0.01)

    class SilentServer(ScriptedServer):
        def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    host = ScriptedHost(server_class=SilentServer)
    async with open_pool(host, 1, is_started=False) as pool:
        with pytest.raises(SandboxFailure, match="no greeting"):
            await pool.start()
        await host.servers[0].wait()


async def test_closing_does_not_wait_for_a_replacement_that_cannot_start_yet():
    host = ScriptedHost(launch_only_one)
    async with open_pool(host, 1) as pool:
        host.servers[0].disconnect()
        await wait_until(lambda: host.launches == 2)
        await pool.close()
