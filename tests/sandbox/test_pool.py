"""Slots of fork servers: who runs beside whom. The fork server is a stand-in that answers what it is told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from sandbox import pool as pool_module
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
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(encode({"hello": "bare"}))

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
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

    def kill(self) -> None: ...

    async def ended(self) -> None:
        await self._gone.wait()


class StandInHost:
    """Implements sandbox.host.Host."""

    def __init__(self) -> None:
        self.servers: list[StandIn] = []

    async def start(self) -> None: ...

    async def launch(self, module: str, settings: Settings) -> StandIn:
        server = StandIn()
        await asyncio.get_running_loop().create_connection(lambda: server, sock=server.theirs)
        self.servers.append(server)
        return server

    def memory_share(self) -> float:
        return 0.0

    def about(self) -> tuple[str, tuple[str, ...]]:
        return "told", ()

    async def close(self) -> None: ...


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
