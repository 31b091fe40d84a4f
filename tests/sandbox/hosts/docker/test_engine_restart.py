"""Restart of the Docker engine under a running sandbox, with a private engine."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import pytest

from asterism.bus.messages import CodeOk, CodeRequested, Output
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.hosts.docker.docker_api import DockerEngine, OwnedContainer
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from tests.sandbox.own_engine import Engine, needs_root, own_engine

pytestmark = [pytest.mark.docker, pytest.mark.slow, needs_root]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with own_engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.address)
        yield engine


def make_program(code: str, trajectory: int) -> CodeRequested:
    return CodeRequested(trajectory, 0, "python_code_with_standard_io", code, "")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_the_sandbox_continues_after_a_restart_of_the_engine(engine: Engine, how: signal.Signals) -> None:
    async def scenario() -> None:
        host = ContainerHost(SandboxConfig(), run="test")
        sandbox = ForkServerSandbox(host, SandboxConfig())
        await sandbox.start()
        try:
            code = "import time; time.sleep(0.5); print(1)"
            calls = [sandbox.run(make_program(code, number)) for number in range(100)]
            in_flight = asyncio.gather(*calls, return_exceptions=True)
            await sandbox.run(make_program("print(1)", 1000))
            await asyncio.to_thread(engine.stop, how)
            await asyncio.to_thread(engine.start)
            results = await in_flight
            assert all(isinstance(result, CodeResult | SandboxFailure) for result in results), results
            assert await asyncio.wait_for(wait_for_outcome(sandbox), 60) == CodeOk(Output("42\n"))
            (container,) = host.live_containers
            assert [owned.id for owned in await list_containers(engine)] == [container.id]
        finally:
            await sandbox.close()
        assert await list_containers(engine) == []

    asyncio.run(scenario())


async def wait_for_outcome(sandbox: ForkServerSandbox) -> object:
    while True:
        with contextlib.suppress(SandboxFailure):
            return (await sandbox.run(make_program("print(6 * 7)", 99))).outcome


async def list_containers(engine: Engine) -> list[OwnedContainer]:
    client = DockerEngine(engine.address)
    try:
        return await client.list_owned()
    finally:
        await client.close()
