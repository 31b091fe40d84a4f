"""Makes the configured sandbox: in containers, on this machine, or in containers with this machine as a fallback."""

import asyncio
from typing import NoReturn

from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import Isolation, SandboxFailure
from asterism.sandbox.fork_server_sandbox import ForkServerSandbox
from asterism.sandbox.hosts.docker.docker_host import ContainerHost
from asterism.sandbox.hosts.host import Host, LaunchedProcess
from asterism.sandbox.hosts.local_host import LocalHost
from asterism.sandbox.inside.wire.server_settings import ServerSettings
from asterism.sandbox.pool.answer_checks import Acceptance


class AutoHost:
    """A Host that uses containers, or this machine if they fail; `describe` then contains the reason."""

    def __init__(self, config: SandboxConfig, run: str) -> None:
        self._containers = ContainerHost(config, run)
        self._chosen: Host = LocalHost()
        self._docker_failure = ""

    async def start(self) -> None:
        try:
            await self._containers.start()
        except BaseException as error:
            await self._containers.close()
            if not isinstance(error, SandboxFailure):
                raise
            self._docker_failure = str(error)
        else:
            self._chosen = self._containers

    async def launch(self, module: str, settings: ServerSettings) -> LaunchedProcess:
        return await self._chosen.launch(module, settings)

    async def wait_until_broken(self) -> NoReturn:
        await self._chosen.wait_until_broken()

    def get_excess_memory(self, share: float) -> int:
        return self._chosen.get_excess_memory(share)

    def describe(self) -> tuple[str, tuple[str, ...]]:
        backend, missing = self._chosen.describe()
        if self._docker_failure:
            missing = (f"No containers: {self._docker_failure}.".replace("..", "."), *missing)
        return backend, missing

    async def close(self) -> None:
        await self._chosen.close()


def make_sandbox(
    config: SandboxConfig, seed: int = 0, run: str = "", accept: Acceptance = "number"
) -> ForkServerSandbox:
    """Make the configured sandbox. `run` labels its containers; `accept` is reward.accept of the configuration."""
    match config.backend:
        case "docker":
            host = ContainerHost(config, run)
        case "process":
            host = LocalHost()
        case "auto":
            host = AutoHost(config, run)
    return ForkServerSandbox(host, config, seed, accept)


def probe_isolation(config: SandboxConfig | None = None) -> Isolation:
    """Start a bare fork server (0.1 s) and return its protections. Raises SandboxFailure."""

    async def probe() -> Isolation:
        sandbox = make_sandbox(config or SandboxConfig())
        try:
            return await sandbox.start()
        finally:
            await sandbox.close()

    return asyncio.run(probe())
