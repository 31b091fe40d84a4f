"""Restart of the Docker engine under a running sandbox, with a private engine."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from asterism.bus.messages import CodeOk, Output
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import CodeResult, SandboxFailure
from tests.sandbox.conftest import wait_for_outcome
from tests.sandbox.hosts.docker.containers import list_containers, run_containers
from tests.sandbox.own_engine import Engine, needs_root, own_engine

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.real_clock, needs_root]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with own_engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.address)
        yield engine


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
async def test_the_sandbox_continues_after_a_restart_of_the_engine(engine: Engine, how: signal.Signals) -> None:
    async with run_containers() as (client, host):
        code = "import time; time.sleep(0.5); print(1)"
        calls = [client.program(code, trajectory=number) for number in range(100)]
        in_flight = asyncio.gather(*calls, return_exceptions=True)
        await client.program("print(1)", trajectory=1000)
        await asyncio.to_thread(engine.stop, how)
        await asyncio.to_thread(engine.start)
        results = await in_flight
        assert all(isinstance(result, CodeResult | SandboxFailure) for result in results), results
        assert await asyncio.wait_for(wait_for_outcome(client), 60) == CodeOk(Output("42\n"))
        (container,) = host.live_containers
        assert await list_containers(host.gate.owner) == [container.id]
