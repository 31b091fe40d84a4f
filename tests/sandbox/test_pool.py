"""Slots of fork servers: who runs beside whom. The fork server is a stand-in that answers what it is told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from sandbox import pool as pool_module
from sandbox import server_process
from sandbox.contract import SandboxFailure
from sandbox.inside.frames import Frame, FrameReader, encode
from sandbox.inside.settings import Settings
from sandbox.pool import MOST_PER_SERVER, RUNNING_PER_SERVER, ForkServerLink, ServerPool

SETTINGS = Settings("bare", False, (), 1.0, 1, 1, 1, 1)


class StandIn(asyncio.Protocol):
    """Implements sandbox.host.Launched. Answers at once, but for calls whose code is "never"."""

    pid = 1

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.running: set[int] = set()
        self.pings = 0
        self.stopped = False
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(encode({"hello": "bare"}))

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
        self._gone.set()

    def answer(self, number: int) -> None:
        self.running.discard(number)
        self._transport.write(encode({"id": number}))

    async def runs(self, calls: int) -> None:
        """Returns when it has so many calls that do not end."""
        while len(self.running) != calls:
            self._changed.clear()
            await self._changed.wait()

    async def pinged(self, times: int) -> None:
        while self.pings < times:
            self._changed.clear()
            await self._changed.wait()

    def hang_up(self) -> None:
        self._transport.close()

    def kill(self) -> None: ...

    async def ended(self) -> None:
        await self._gone.wait()


class StandInHost:
    """Implements sandbox.host.Host."""

    stand_in = StandIn

    def __init__(self) -> None:
        self.servers: list[StandIn] = []

    async def start(self) -> None: ...

    async def launch(self, module: str, settings: Settings) -> StandIn:
        server = self.stand_in()
        await asyncio.get_running_loop().create_connection(lambda: server, sock=server.theirs)
        self.servers.append(server)
        return server

    def memory_share(self) -> float:
        return 0.0

    def about(self) -> tuple[str, tuple[str, ...]]:
        return "told", ()

    async def close(self) -> None: ...


class NoSecond(StandInHost):
    """Its second server never stands."""

    launches = 0

    async def launch(self, module: str, settings: Settings) -> StandIn:
        self.launches += 1
        if self.launches == 2:
            await asyncio.Event().wait()
        return await super().launch(module, settings)


class Caller:
    def __init__(self, pool: ServerPool, server: StandIn) -> None:
        self._pool = pool
        self.server = server
        self._calls = 0
        self.link: ForkServerLink

    async def __call__(self, code: str) -> Frame:
        self._calls += 1
        frame = {"id": self._calls, "op": "run", "code": code}
        self.link = await self._pool.take()
        try:
            return await self.link.call(frame)
        finally:
            self._pool.give_back(self.link)


def play(scenario: Callable[[Caller], Awaitable[None]]) -> None:
    async def whole() -> None:
        host = StandInHost()
        pool = ServerPool(host, SETTINGS, 1)
        await pool.start()
        try:
            async with asyncio.timeout(30):
                await scenario(Caller(pool, host.servers[0]))
        finally:
            await pool.close()

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_LOOK_S", 0.001)


async def stop(tasks: list[asyncio.Task[Frame]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_server_that_answers_nothing_is_replaced_and_one_whose_calls_are_long_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_PING_S", 0.001)

    async def scenario(call: Caller) -> None:
        endless = asyncio.create_task(call("never"))
        await call.server.pinged(50)
        assert not endless.done()
        call.server.stopped = True
        with pytest.raises(SandboxFailure, match="fork server died"):
            await endless
        assert await call("quick") == {"id": 2}

    play(scenario)


def test_calls_that_never_end_keep_no_other_from_running():
    async def scenario(call: Caller) -> None:
        endless = [asyncio.create_task(call("never")) for _ in range(3 * RUNNING_PER_SERVER)]
        await call.server.runs(len(endless))
        assert [(await call("quick"))["id"] for _ in range(3)] == [len(endless) + number for number in (1, 2, 3)]
        assert not any(task.done() for task in endless)
        await stop(endless)

    play(scenario)


@pytest.mark.parametrize(
    ("overtaking", "is_long"), [(2 * RUNNING_PER_SERVER - 1, False), (2 * RUNNING_PER_SERVER, True)]
)
def test_a_call_that_many_others_overtake_holds_no_slot_of_theirs(
    overtaking: int, is_long: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pool_module, "_LOOK_S", 1e6)

    async def scenario(call: Caller) -> None:
        endless = [asyncio.create_task(call("never")) for _ in range(RUNNING_PER_SERVER - 1)]
        await call.server.runs(len(endless))
        for _ in range(overtaking):
            await call("quick")
        endless.append(asyncio.create_task(call("never")))
        await call.server.runs(RUNNING_PER_SERVER)
        assert not call.link.has_room
        call.link.look_for_long_calls()
        assert call.link.has_room == is_long
        await stop(endless)

    play(scenario)


def test_a_server_never_runs_more_than_its_bound_and_those_who_wait_come_in_their_order():
    async def scenario(call: Caller) -> None:
        endless = [asyncio.create_task(call("never")) for _ in range(MOST_PER_SERVER + 2)]
        await call.server.runs(MOST_PER_SERVER)
        for _ in range(20):  # looks
            await asyncio.sleep(0.001)
        assert call.server.running == set(range(1, MOST_PER_SERVER + 1))
        call.server.answer(7)
        await call.server.runs(MOST_PER_SERVER)
        assert MOST_PER_SERVER + 1 in call.server.running
        assert MOST_PER_SERVER + 2 not in call.server.running
        await stop(endless)

    play(scenario)


def test_slots_of_calls_that_were_long_are_ordinary_again():
    async def scenario(call: Caller) -> None:
        endless = [asyncio.create_task(call("never")) for _ in range(3 * RUNNING_PER_SERVER)]
        await call.server.runs(len(endless))
        await stop(endless)
        await call.server.runs(0)
        again = [asyncio.create_task(call("never")) for _ in range(RUNNING_PER_SERVER)]
        await call.server.runs(RUNNING_PER_SERVER)
        assert (await asyncio.gather(*[call("quick") for _ in range(10)]))[-1]["id"] == 4 * RUNNING_PER_SERVER + 10
        await stop(again)

    play(scenario)


def play_pool(scenario: Callable[[ServerPool, StandInHost], Awaitable[None]], host: StandInHost, size: int) -> None:
    async def whole() -> None:
        pool = ServerPool(host, SETTINGS, size)
        try:
            async with asyncio.timeout(30):
                await scenario(pool, host)
        finally:
            await pool.close()

    asyncio.run(whole())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def turns(number: int) -> None:
    """Of the event loop: what is on its way arrives."""
    for _ in range(number):
        await asyncio.sleep(0)


async def answer(pool: ServerPool) -> Frame:
    server = await pool.take()
    try:
        return await server.call({"id": 1, "op": "run", "code": ""})
    finally:
        pool.give_back(server)


def test_each_of_many_servers_that_die_at_once_has_a_successor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_RESTART_PAUSE_S", 0.0)
    size = 16

    async def scenario(pool: ServerPool, host: StandInHost) -> None:
        await pool.start()
        for server in host.servers:
            server.hang_up()
        await until(lambda: len(host.servers) == 2 * size and len(pool.server_pids) == size)
        assert (await answer(pool))["id"] == 1

    play_pool(scenario, StandInHost(), size)


def test_a_server_that_dies_while_others_start_has_a_successor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_RESTART_PAUSE_S", 0.0)

    class DyingFirst(StandInHost):
        """The second server starts only when the first one has greeted and died."""

        launches = 0

        async def launch(self, module: str, settings: Settings) -> StandIn:
            self.launches += 1
            if self.launches == 2:
                await until(lambda: len(self.servers) == 1)
                await turns(20)
                self.servers[0].hang_up()
                await self.servers[0].ended()
                await turns(20)
            return await super().launch(module, settings)

    async def scenario(pool: ServerPool, host: StandInHost) -> None:
        await pool.start()
        await until(lambda: len(host.servers) == 3 and len(pool.server_pids) == 2)

    play_pool(scenario, DyingFirst(), 2)


def test_calls_fail_while_no_server_can_be_started_and_are_answered_again_when_one_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_RESTART_PAUSE_S", 0.0)

    class Refusing(StandInHost):
        refuses = False

        async def launch(self, module: str, settings: Settings) -> StandIn:
            await asyncio.sleep(0)
            if self.refuses:
                raise SandboxFailure("no container")
            return await super().launch(module, settings)

    host = Refusing()

    async def scenario(pool: ServerPool, _: StandInHost) -> None:
        await pool.start()
        host.refuses = True
        host.servers[0].hang_up()
        await host.servers[0].ended()
        with pytest.raises(SandboxFailure):
            while True:
                await answer(pool)
        with pytest.raises(SandboxFailure, match="no fork server can be started"):
            while True:
                await answer(pool)
        host.refuses = False
        await until(lambda: len(pool.server_pids) == 1)
        assert (await answer(pool))["id"] == 1

    play_pool(scenario, host, 1)


def test_a_start_that_is_cancelled_leaves_no_server():
    async def scenario(pool: ServerPool, host: StandInHost) -> None:
        starting = asyncio.create_task(pool.start())
        await until(lambda: len(host.servers) == 1)
        await turns(20)  # it greets
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await host.servers[0].ended()

    play_pool(scenario, NoSecond(), 2)


def test_a_server_that_says_nothing_when_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_process, "_GREETING_S", 0.01)

    class Mute(StandIn):
        def connection_made(self, transport: asyncio.BaseTransport) -> None: ...

    class MuteHost(StandInHost):
        stand_in = Mute

    async def scenario(pool: ServerPool, host: StandInHost) -> None:
        with pytest.raises(SandboxFailure, match="said nothing"):
            await pool.start()
        await host.servers[0].ended()

    play_pool(scenario, MuteHost(), 1)


def test_closing_does_not_wait_for_a_successor_that_cannot_start_yet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_module, "_RESTART_PAUSE_S", 0.0)

    host = NoSecond()

    async def scenario(pool: ServerPool, _: StandInHost) -> None:
        await pool.start()
        host.servers[0].hang_up()
        await until(lambda: host.launches == 2)
        await pool.close()

    play_pool(scenario, host, 1)
