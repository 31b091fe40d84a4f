"""The benchmark's setup of both backends: one fork server for each flavour, all on one core."""

from __future__ import annotations

from typing import Any

from configs.schema import SandboxConfig as SandboxConfig
from sandbox.hosts.host import Host
from sandbox.hosts.local_host import LocalHost


def build_config(backend: str, core: int, **limits: Any) -> SandboxConfig:
    """Build a configuration with `core` as a container's cpuset. Local processes inherit theirs."""
    return SandboxConfig(backend=backend, fork_servers=1, cpuset=str(core), **limits)  # pyright: ignore[reportArgumentType]


def create_host(backend: str, config: SandboxConfig) -> Host:
    if backend == "process":
        return LocalHost()
    from sandbox.hosts.docker.docker_host import (
        ContainerHost,  # imported here: other backends need no container client
    )

    return ContainerHost(config, run="benchmark")
