"""The two backends as the benchmark sets them up: one fork server for each flavour, all of it on one core."""

from __future__ import annotations

from typing import Any

from configs.schema import Sandbox as SandboxConfig
from sandbox.host import Host
from sandbox.process_backend import LocalHost


def config_of(backend: str, core: int, **limits: Any) -> SandboxConfig:
    """A container is told its core; what this process starts inherits it."""
    return SandboxConfig(backend=backend, fork_servers=1, cpuset=str(core), **limits)  # pyright: ignore[reportArgumentType]


def host_of(backend: str, config: SandboxConfig) -> Host:
    if backend == "process":
        return LocalHost()
    from sandbox.docker_backend import ContainerHost  # where no engine is wanted, its client need not be there

    return ContainerHost(config, run="benchmark")
