"""The automatic choice of a backend, and the probe of `asterism doctor`."""

import asyncio

import pytest

from configs.schema import SandboxConfig as SandboxConfig
from sandbox.hosts.docker.docker_host import ContainerHost
from sandbox.select_backend import AutoHost, probe_isolation


async def test_a_cancelled_choice_of_a_backend_closes_the_container_host(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    async def wait_forever(self: object) -> None:
        await asyncio.Event().wait()

    async def close(self: object) -> None:
        closed.append(True)

    monkeypatch.setattr(ContainerHost, "start", wait_forever)
    monkeypatch.setattr(ContainerHost, "close", close)

    starting = asyncio.create_task(AutoHost(SandboxConfig(), "").start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert closed


@pytest.mark.slow
def test_the_probe_reports_the_isolation_in_force() -> None:
    isolation = probe_isolation(SandboxConfig(backend="process"))
    assert isolation.backend == "process"
    assert all(sentence.endswith(".") for sentence in isolation.missing)
