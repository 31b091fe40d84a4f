"""Run a sandbox on fresh containers, and list its containers."""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

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
