"""Tests of the automatic choice of a backend, and of the probe of `asterism doctor`."""

import asyncio
import sys

import pytest

from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.hosts.docker import docker_host
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.hosts.docker.docker_probe import DockerProbeResult
from asterism.sandbox.select_backend import AutoHost, probe_isolation


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


@pytest.mark.real_clock
async def test_a_machine_without_aiodocker_uses_the_process_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_host, "probe_docker", lambda environ: DockerProbeResult("an engine", ""))
    monkeypatch.setitem(sys.modules, "aiodocker", None)
    monkeypatch.delitem(sys.modules, "asterism.sandbox.hosts.docker.docker_api", raising=False)
    host = AutoHost(SandboxConfig(), "")
    await host.start()
    backend, missing = host.describe()
    assert backend == "process"
    assert missing[0].startswith("No containers: containers need the package aiodocker")


@pytest.mark.slow
def test_the_probe_reports_the_isolation_in_force() -> None:
    isolation = probe_isolation(SandboxConfig(backend="process"))
    assert isolation.backend == "process"
    assert all(sentence.endswith(".") for sentence in isolation.missing)
