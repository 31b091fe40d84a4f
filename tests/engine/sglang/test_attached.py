"""Attaching to a server that others run, where it is of another version, says nothing, or is started again by them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from engine.sglang.attached import AttachedServer
from engine.sglang.fit import ServerUnusable
from engine.sglang.silence import SILENT_TIMES
from tests.engine.sglang.servers import info, wanted


class Other:
    """Somebody else's server; without a version, one of another kind."""

    def __init__(self, version: str = "0.5.23") -> None:
        self.version = version
        self.is_ready = True
        self.is_stopped = False  # connections are taken, and nothing is answered
        self.breaks = 0  # so many of the first requests are broken connections
        self.asked: list[str] = []  # paths, in order
        self.asked_once_more = asyncio.Event()

    @web.middleware
    async def take(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(request.path)
        self.asked_once_more.set()
        if self.is_stopped:
            await asyncio.Event().wait()
        if len(self.asked) <= self.breaks and request.transport is not None:
            request.transport.abort()
        return await handler(request)

    async def server_info(self, _: web.Request) -> web.Response:
        if not self.version:
            raise web.HTTPNotFound
        return web.json_response(msgspec.to_builtins(info(version=self.version)))

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_ready else 503)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application(middlewares=[self.take])
        app.add_routes([web.get("/server_info", self.server_info), web.get("/ready", self.ready)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def attached(url: str, *, again: bool = False, **sglang: object) -> AttachedServer:
    return AttachedServer(wanted(attach=(url,), **sglang), again=again, ask_every_s=0.001)


def test_one_that_fits_is_attached_to():
    async def scenario() -> None:
        async with Other().listening() as url:
            server = attached(f"{url}/")
            assert await server.start() == server.url == url
            assert server.info == info()
            assert not server.died.done()
            await server.close()
            await server.close()
            assert server.died.cancelled()

    asyncio.run(scenario())


def test_an_unknown_version_is_refused_by_key_and_place():
    async def scenario() -> str:
        async with Other(version="0.9.9").listening() as url:
            with pytest.raises(ServerUnusable) as caught:
                await attached(url).start()
            return str(caught.value).replace(url, "URL")

    said = asyncio.run(scenario())
    assert said.startswith("sglang.attach[0] = URL: SGLang 0.9.9 is not known")
    assert "0.5.23" in said


@pytest.mark.slow
def test_where_nobody_listens_the_place_is_named():
    async def scenario() -> None:
        async with Other().listening() as url:
            pass
        with pytest.raises(ServerUnusable, match=f"^sglang.attach\\[0\\] = {url}: "):
            await attached(url).start()

    asyncio.run(scenario())


def test_somebody_who_is_no_sglang_server_is_refused_by_place():
    async def scenario() -> str:
        async with Other(version="").listening() as url:
            with pytest.raises(ServerUnusable) as caught:
                await attached(url).start()
            return str(caught.value).replace(url, "URL")

    assert asyncio.run(scenario()).startswith("sglang.attach[0] = URL: the server refused /server_info: 404")


def test_one_that_is_paused_and_so_not_ready_lives():
    async def scenario() -> None:
        other = Other()
        async with other.listening() as url:
            server = attached(url)
            await server.start()
            other.is_ready = False
            for _ in range(3 * SILENT_TIMES):
                other.asked_once_more.clear()
                await other.asked_once_more.wait()
            assert not server.died.done()
            await server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["gone", "stopped"])
def test_one_that_does_not_answer_any_more_has_died(how: str):
    async def scenario() -> str:
        other = Other()
        async with other.listening() as url:
            server = attached(url, ready_s=10.0 if how == "gone" else 0.05)
            await server.start()
            other.breaks, other.is_stopped = (10**6, False) if how == "gone" else (0, True)
            why = await server.died
            await server.close()
            return why.replace(url, "URL")

    assert asyncio.run(scenario()) == "sglang.attach[0] = URL does not answer any more"


def test_one_that_is_attached_to_again_is_waited_for():
    async def scenario() -> None:
        other = Other()
        other.breaks = 5
        async with other.listening() as url:
            server = attached(url, again=True)
            assert await server.start() == url
            assert other.asked[:7] == ["/ready"] * 6 + ["/server_info"]
            await server.close()

    asyncio.run(scenario())


def test_one_that_does_not_come_again_is_named_with_how_long_was_waited():
    async def scenario() -> str:
        other = Other()
        other.breaks = 10**6
        async with other.listening() as url:
            with pytest.raises(ServerUnusable) as caught:
                await attached(url, again=True, start_s=0.05).start()
            return str(caught.value).replace(url, "URL")

    said = "sglang.attach[0] = URL: has died, and nobody has answered there for sglang.start_s = 0.05"
    assert asyncio.run(scenario()) == said
