"""Attaches to external servers that are incompatible, unresponsive or restarting."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from engine.sglang.server.compatibility import ServerUnusable
from engine.sglang.server.external_server import ExternalServer
from engine.sglang.server.managed_server import MAX_FAILED_PROBES
from tests.engine.sglang.fake_server import FakeServer
from tests.engine.sglang.server.requirements import make_info, make_requirements


def make_fake_server(version: str = "0.5.23") -> FakeServer:
    fake = FakeServer()
    fake.info = msgspec.to_builtins(make_info(version=version))
    return fake


def attach(url: str, *, is_restart: bool = False, **sglang: object) -> ExternalServer:
    return ExternalServer(
        make_requirements(external_urls=(url,), **sglang), is_restart=is_restart, probe_interval_s=0.001
    )


def test_a_compatible_server_is_attach():
    async def scenario() -> None:
        async with make_fake_server().serving() as url:
            server = attach(f"{url}/")
            assert await server.start() == server.url == url
            assert server.info == make_info()
            assert not server.death.done()
            await server.close()
            await server.close()
            assert server.death.cancelled()

    asyncio.run(scenario())


def test_an_unsupported_version_is_refused_by_key_and_index():
    async def scenario() -> str:
        async with make_fake_server(version="0.9.9").serving() as url:
            with pytest.raises(ServerUnusable) as caught:
                await attach(url).start()
            return str(caught.value).replace(url, "URL")

    message = asyncio.run(scenario())
    assert message.startswith("sglang.external_urls[0] = URL: SGLang 0.9.9 is not supported")
    assert "0.5.23" in message


@pytest.mark.slow
def test_a_refused_connection_names_the_key_and_index():
    async def scenario() -> None:
        async with make_fake_server().serving() as url:
            pass
        with pytest.raises(ServerUnusable, match=f"^sglang.external_urls\\[0\\] = {url}: "):
            await attach(url).start()

    asyncio.run(scenario())


def test_a_server_of_another_kind_is_refused_by_key_and_index():
    async def scenario() -> str:
        async with make_fake_server(version="").serving() as url:
            with pytest.raises(ServerUnusable) as caught:
                await attach(url).start()
            return str(caught.value).replace(url, "URL")

    assert asyncio.run(scenario()).startswith("sglang.external_urls[0] = URL: the server refused /server_info: 404")


def test_a_paused_server_stays_attach():
    async def scenario() -> None:
        fake = make_fake_server()
        async with fake.serving() as url:
            server = attach(url)
            await server.start()
            fake.paused = True
            for _ in range(3 * MAX_FAILED_PROBES):
                fake.request_received.clear()
                await fake.request_received.wait()
            assert not server.death.done()
            await server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_an_unresponsive_server_is_dead(how: str):
    async def scenario() -> str:
        fake = make_fake_server()
        async with fake.serving() as url:
            server = attach(url, health_timeout_s=10.0 if how == "closed" else 0.05)
            await server.start()
            fake.num_broken_requests, fake.stopped = (10**6, False) if how == "closed" else (0, True)
            cause = await server.death
            await server.close()
            return cause.replace(url, "URL")

    assert asyncio.run(scenario()) == "sglang.external_urls[0] = URL no longer responds"


def test_a_restarted_engine_waits_for_its_server():
    async def scenario() -> None:
        fake = make_fake_server()
        fake.num_broken_requests = 5
        async with fake.serving() as url:
            server = attach(url, is_restart=True)
            assert await server.start() == url
            assert [path for path, _ in fake.requests][:7] == ["/ready"] * 6 + ["/server_info"]
            await server.close()

    asyncio.run(scenario())


def test_a_server_that_does_not_return_is_named_with_the_timeout():
    async def scenario() -> str:
        fake = make_fake_server()
        fake.num_broken_requests = 10**6
        async with fake.serving() as url:
            with pytest.raises(ServerUnusable) as caught:
                await attach(url, is_restart=True, startup_timeout_s=0.05).start()
            return str(caught.value).replace(url, "URL")

    message = "sglang.external_urls[0] = URL: no response since the server died, within sglang.startup_timeout_s = 0.05"
    assert asyncio.run(scenario()) == message
