"""Attaching to a server that others run, where it says that it is of another version, or says nothing at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from engine.sglang.attached import SILENT_TIMES, AttachedServer
from engine.sglang.fit import ServerUnusable
from tests.engine.sglang.servers import info, wanted


class Other:
    """Somebody else's server; without a version, one of another kind."""

    def __init__(self, version: str = "0.5.23") -> None:
        self.version = version
        self.is_healthy = self.is_ready = True
        self.pings = 0

    async def server_info(self, _: web.Request) -> web.Response:
        if not self.version:
            raise web.HTTPNotFound
        return web.json_response(msgspec.to_builtins(info(version=self.version)))

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_ready else 503)

    async def ping(self, _: web.Request) -> web.Response:
        self.pings += 1
        return web.Response(status=200 if self.is_healthy else 503)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes(
            [web.get("/server_info", self.server_info), web.get("/ready", self.ready), web.get("/ping", self.ping)]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def attached(url: str, **sglang: object) -> AttachedServer:
    return AttachedServer(wanted(attach=(url,), **sglang), ask_every_s=0.001)


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


def test_one_that_is_paused_for_long_has_not_died():
    async def scenario() -> None:
        other = Other()
        async with other.listening() as url:
            server = attached(url)
            await server.start()
            other.is_ready = False
            while other.pings <= 2 * SILENT_TIMES and not server.died.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not server.died.done()
            await server.close()

    asyncio.run(scenario())


def test_one_that_is_not_healthy_any_more_has_died():
    async def scenario() -> str:
        other = Other()
        async with other.listening() as url:
            server = attached(url)
            await server.start()
            other.is_ready = other.is_healthy = False
            why = await server.died
            await server.close()
            return why.replace(url, "URL")

    assert asyncio.run(scenario()) == "sglang.attach[0] = URL does not answer any more"
