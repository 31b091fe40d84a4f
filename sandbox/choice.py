"""Which backend a configuration gets: containers, this machine, or whichever there is."""

from __future__ import annotations

from typing import NoReturn

from configs.schema import Sandbox as SandboxConfig
from sandbox.backend import ForkServerSandbox
from sandbox.contract import SandboxFailure
from sandbox.docker_backend import ContainerHost, docker_sandbox
from sandbox.host import Host, Launched
from sandbox.inside.settings import Settings
from sandbox.process_backend import LocalHost, process_sandbox


class AutoHost:
    """Implements sandbox.host.Host: containers if an engine and the image are there, else this machine, and says why."""

    def __init__(self, config: SandboxConfig, run: str) -> None:
        self._containers = ContainerHost(config, run)
        self._chosen: Host = LocalHost()
        self._why_not = ""

    async def start(self) -> None:
        try:
            await self._containers.start()
        except BaseException as error:
            await self._containers.close()
            if not isinstance(error, SandboxFailure):
                raise
            self._why_not = str(error)
        else:
            self._chosen = self._containers

    async def launch(self, module: str, settings: Settings) -> Launched:
        return await self._chosen.launch(module, settings)

    async def until_broken(self) -> NoReturn:
        await self._chosen.until_broken()

    def memory_share(self) -> float:
        return self._chosen.memory_share()

    def about(self) -> tuple[str, tuple[str, ...]]:
        backend, lacks = self._chosen.about()
        return backend, (f"No containers: {self._why_not}.".replace("..", "."), *lacks) if self._why_not else lacks

    async def close(self) -> None:
        await self._chosen.close()


def sandbox_of(config: SandboxConfig, seed: int = 0, run: str = "") -> ForkServerSandbox:
    """`run` labels what it leaves in the engine's lists."""
    match config.backend:
        case "docker":
            return docker_sandbox(config, seed, run)
        case "process":
            return process_sandbox(config, seed)
        case "auto":
            return ForkServerSandbox(AutoHost(config, run), config, seed)
