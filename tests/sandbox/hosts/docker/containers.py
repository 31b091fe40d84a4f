"""Run a sandbox on fresh containers, list its containers, and wait for its recovery after a failure."""

import contextlib
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from asterism.bus.messages import CodeOutcome
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.docker.docker_api import DockerEngine
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.hosts.docker.docker_probe import get_engine_address
from tests.sandbox.conftest import Client, open_sandbox


@asynccontextmanager
async def run_containers(**settings: Any) -> AsyncGenerator[tuple[Client, ContainerHost]]:
    """Run a sandbox on fresh containers, and check that none is left at the end."""
    async with open_sandbox("docker", **settings) as client:
        host = client.sandbox._host  # pyright: ignore[reportPrivateUsage]
        assert isinstance(host, ContainerHost)
        folder, owner = host.gate.folder, host.gate.owner
        yield client, host
    assert await list_containers(owner) == []
    assert not folder.parent.exists()


async def list_containers(owner: str) -> list[str]:
    engine = DockerEngine(get_engine_address(os.environ))
    try:
        return [container.id for container in await engine.list_owned() if container.owner == owner]
    finally:
        await engine.close()


async def wait_for_outcome(client: Client) -> CodeOutcome:
    """Return the first outcome of a recovering sandbox; ignore infrastructure failures before it."""
    while True:
        with contextlib.suppress(SandboxFailure):
            return (await client.program("print(6 * 7)", trajectory=99)).outcome
