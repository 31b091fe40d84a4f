"""Tests of attaching to external servers, which can be incompatible, unresponsive or restarting."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from asterism.engine.sglang.server.compatibility import ServerUnusable
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.server.managed_server import MAX_FAILED_PROBES
from tests.engine.sglang.fake_server import FakeServer, Handler, broken, refusing, silent
from tests.engine.sglang.server.requirements import make_info, make_requirements

pytestmark = pytest.mark.real_clock


@asynccontextmanager
async def connected(*, is_restart: bool = False, **sglang: Any) -> AsyncIterator[tuple[FakeServer, ExternalServer]]:
    fake = FakeServer()
    fake.info = msgspec.to_builtins(make_info())
    async with fake.serving() as url:
        requirements = make_requirements(external_urls=(f"{url}/",), **sglang)
        server = ExternalServer(requirements, is_restart=is_restart, probe_interval_s=0.001)
        yield fake, server
        await server.close()
        await server.close()


async def test_a_compatible_server_is_attached():
    async with connected() as (_, server):
        assert await server.start() == server.url
        assert not server.url.endswith("/")
        assert server.info == make_info()
        assert not server.death.done()
        await server.close()
        assert server.death.cancelled()


@pytest.mark.parametrize(
    ("handler", "cause"),
    [
        (refusing(200, {"version": "0.9.9"}), "SGLang 0.9.9 is not supported; supported: 0.5.23"),
        (refusing(404, {}), "the server refused /server_info: 404 {}"),  # another kind of server
        pytest.param(broken, "/server_info: the connection broke (ServerDisconnectedError)", marks=pytest.mark.slow),
    ],
    ids=["version", "kind", "connection"],
)
async def test_the_error_for_an_unusable_server_names_key_and_index(handler: Handler, cause: str):
    async with connected() as (fake, server):
        fake.handlers["/server_info"] = handler
        with pytest.raises(ServerUnusable) as caught:
            await server.start()
        assert str(caught.value) == f"sglang.external_urls[0] = {server.url}: {cause}"


async def test_a_paused_server_stays_attached():
    async with connected() as (fake, server):
        await server.start()
        fake.handlers["/ready"] = refusing(503, {})
        for _ in range(3 * MAX_FAILED_PROBES):
            fake.request_received.clear()
            await fake.request_received.wait()
        assert not server.death.done()


@pytest.mark.parametrize(("handler", "timeout_s"), [(broken, 10.0), (silent, 0.05)], ids=["broken", "silent"])
@pytest.mark.slow
async def test_an_unresponsive_server_counts_as_dead(handler: Handler, timeout_s: float):
    async with connected(health_timeout_s=timeout_s) as (fake, server):
        await server.start()
        fake.handlers["/ready"] = handler
        assert await server.death == f"sglang.external_urls[0] = {server.url} no longer responds"


async def test_a_restarted_engine_waits_for_its_server():
    async with connected(is_restart=True) as (fake, server):
        fake.num_broken_requests = 5
        await server.start()
        assert [path for path, _ in fake.requests][:7] == ["/ready"] * 6 + ["/server_info"]


async def test_the_error_for_a_server_that_does_not_return_names_server_and_timeout():
    async with connected(is_restart=True, startup_timeout_s=0.05) as (fake, server):
        fake.handlers["/ready"] = broken
        with pytest.raises(ServerUnusable) as caught:
            await server.start()
        assert str(caught.value) == (
            f"sglang.external_urls[0] = {server.url}: no response since the server died, "
            "within sglang.startup_timeout_s = 0.05"
        )
