"""A Docker engine that is restarted under a running sandbox: one of the test's own, so that no other is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest

from bus.messages import CodeOk, CodeRequested, Output
from configs.schema import Sandbox as SandboxConfig
from sandbox.backend import ForkServerSandbox
from sandbox.contract import CodeResult, SandboxFailure
from sandbox.docker_backend import ContainerHost
from sandbox.docker_engine import DockerEngine
from tests.sandbox.own_engine import Engine, needs_root, own_engine

pytestmark = [pytest.mark.docker, pytest.mark.slow, needs_root]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with own_engine() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        yield engine


def program(code: str, trajectory: int) -> CodeRequested:
    return CodeRequested(trajectory, 0, "python_code_with_standard_io", code, "")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_calls_outlive_an_engine_that_is_restarted(engine: Engine, how: signal.Signals) -> None:
    async def whole() -> None:
        host = ContainerHost(SandboxConfig(), run="test")
        sandbox = ForkServerSandbox(host, SandboxConfig())
        await sandbox.start()
        try:
            calls = [sandbox.run(program("import time; time.sleep(0.5); print(1)", number)) for number in range(100)]
            under_way = asyncio.gather(*calls, return_exceptions=True)
            await sandbox.run(program("print(1)", 1000))
            await asyncio.to_thread(engine.stop, how)
            await asyncio.to_thread(engine.start)
            ends = await under_way
            assert all(isinstance(end, CodeResult | SandboxFailure) for end in ends), ends
            assert await asyncio.wait_for(answered(sandbox), 60) == CodeOk(Output("42\n"))
            (container,) = host.containers
            assert [owned.id for owned in await containers(engine)] == [container.id]
        finally:
            await sandbox.close()
        assert await containers(engine) == []

    asyncio.run(whole())


async def answered(sandbox: ForkServerSandbox) -> object:
    """The first outcome of a sandbox that is healing."""
    while True:
        with contextlib.suppress(SandboxFailure):
            return (await sandbox.run(program("print(6 * 7)", 99))).outcome


async def containers(engine: Engine) -> list[object]:
    client = DockerEngine(engine.address)
    try:
        return list(await client.owned())
    finally:
        await client.close()
