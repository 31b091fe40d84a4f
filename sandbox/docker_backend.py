"""The sandbox in containers: one or more on this machine, each with fork servers of its own.

    this process -> engine      create, start, remove; labels say whose a container is
    keeper       -> gate        the container's first process connects to a socket in a folder that it sees
    fork servers -> gate        they connect by themselves; calls and answers do not pass through the engine

A container that is lost is replaced, with a growing pause while the engine refuses; what was under way in it raises
SandboxFailure. When this process dies in whatever way, the keepers lose their connection and the containers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn

import structlog

from configs.schema import Sandbox as SandboxConfig
from sandbox.backend import ForkServerSandbox
from sandbox.container import Container, ContainerProcess
from sandbox.container_seccomp import profile
from sandbox.contract import SandboxFailure
from sandbox.docker_engine import ContainerSpec, DockerEngine
from sandbox.docker_probe import engine_address, try_docker
from sandbox.gate import Gate
from sandbox.image import image_name
from sandbox.inside.frames import Frame
from sandbox.inside.keeper import SECRET
from sandbox.inside.settings import Settings
from sandbox.owner import is_gone, owner_mark

_HELLO_S = 30.0  # from the container's start to its keeper's word
_HEAL_S = 30.0  # that a launch waits for a container before it fails
_PAUSES_S = (0.1, 0.3, 1.0, 3.0, 5.0)  # between two attempts to replace a container; the last one repeats
_MEMORY_EVERY_S = 0.5
_LOOK_S = 0.5  # between two looks whether there is a container
_SILENCE_S = 60.0  # a keeper that answers nothing for so long is frozen, and its container is replaced


class ContainerHost:
    """Implements sandbox.host.Host."""

    def __init__(self, config: SandboxConfig, run: str) -> None:
        self._config = config
        self._run = run
        self._image = config.image or image_name()
        self._gate = Gate(self._on_arrival)
        self._engine: DockerEngine | None = None
        self._expected: dict[str, asyncio.Future[socket.socket]] = {}  # keepers, by secret
        self._secrets: dict[str, Container] = {}
        self._containers: list[Container] = []
        self._changed = asyncio.Event()
        self._cause = ""  # why there is no container, if there is none
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._logger = structlog.get_logger()

    @property
    def socket_folder(self) -> Path:
        return self._gate.folder

    @property
    def containers(self) -> list[Container]:
        """Those that are alive."""
        return [container for container in self._containers if container.alive]

    async def start(self) -> None:
        trial = await asyncio.to_thread(try_docker, os.environ)
        if trial.remedy:
            raise SandboxFailure(f"no Docker engine: {trial.found}. {trial.remedy}")
        self._engine = DockerEngine(engine_address(os.environ))
        await self._engine.look()
        if not await self._engine.has_image(self._image):
            raise SandboxFailure(f"no image {self._image}: run `make sandbox-image`, or `make sandbox-image-local`")
        self._gate.open()
        await self._sweep(self._engine)
        starts = [self._add(self._engine) for _ in range(self._config.containers)]
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        self._spawn(self._watch_memory())

    async def launch(self, module: str, settings: Settings) -> ContainerProcess:
        container = await self._least_busy()
        return await container.launch(module, settings)

    async def until_broken(self) -> NoReturn:
        """When there has been no container for `heal_s`: those who ask may have their answers elsewhere."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while loop.time() - last < self._config.heal_s:
            await asyncio.sleep(_LOOK_S)
            if self.containers:
                last = loop.time()
        raise SandboxFailure(f"no container for {self._config.heal_s:g} s: {self._cause}")

    def memory_share(self) -> float:
        return max((container.memory_share for container in self.containers), default=0.0)

    def about(self) -> tuple[str, tuple[str, ...]]:
        return "docker", ()

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for container in self._containers:
            container.let_go()
        if self._engine is not None:
            removals = [self._engine.remove(container.id) for container in self._containers]
            await asyncio.gather(*removals, return_exceptions=True)  # they end by themselves if the engine is away
            await self._engine.close()
        await self._gate.close()

    # ------------------------------------------------------------ containers

    async def _add(self, engine: DockerEngine) -> None:
        """Starts one more container, and waits until its keeper has connected."""
        secret = secrets.token_hex(16)
        arrival = self._expected[secret] = asyncio.get_running_loop().create_future()
        try:
            container_id = await engine.start(self._spec(secret))
            try:
                connection = await asyncio.wait_for(arrival, _HELLO_S)
            except BaseException as error:
                with contextlib.suppress(SandboxFailure):  # a failure here must not hide that this task is cancelled
                    await engine.remove(container_id)
                if isinstance(error, TimeoutError):
                    raise SandboxFailure("the container's keeper did not connect") from None
                raise
        finally:
            del self._expected[secret]
        container = Container(container_id, self._on_end)
        self._secrets[secret] = container
        self._containers.append(container)
        await container.attach(connection)
        self._changed.set()
        self._logger.info("container.started", id=container_id[:12], image=self._image, pid=container.pid)

    def _spec(self, secret: str) -> ContainerSpec:
        config = self._config
        return ContainerSpec(
            image=self._image,
            run=self._run,
            owner=owner_mark(),
            socket_folder=self._gate.folder,
            environment={SECRET: secret},
            memory_mib=config.container_memory_mib,
            processes=config.container_processes,
            file_mib=config.file_mib,
            cpuset=config.cpuset,
            seccomp=profile(),
        )

    def _on_arrival(self, frame: Frame, connection: socket.socket) -> bool:
        secret = str(frame.get("secret"))
        if "token" not in frame:
            arrival = self._expected.get(secret)
            if arrival is None or arrival.done():
                return False
            arrival.set_result(connection)
            return True
        container = self._secrets.get(secret)
        process = container.processes.get(frame["token"]) if container is not None else None
        if process is None:
            return False
        process.take_connection(connection)
        return True

    def _on_end(self, container: Container) -> None:
        self._secrets = {secret: other for secret, other in self._secrets.items() if other is not container}
        if not self._closing:
            self._logger.error("container.lost", id=container.id[:12])
            self._spawn(self._replace(container))

    async def _replace(self, lost: Container) -> None:
        assert self._engine is not None
        attempts = 0
        self._containers.remove(lost)
        self._cause = "the last one ended, and the engine has not given another"
        try:
            await self._engine.remove(lost.id)
        except SandboxFailure as error:  # no reason to be without one: its label lets the next start sweep it
            self._logger.error("container.not_removed", id=lost.id[:12], cause=str(error))
        while not self._closing:
            try:
                await self._add(self._engine)
            except SandboxFailure as error:
                self._cause = str(error)
                self._logger.error("container.not_replaced", id=lost.id[:12], cause=str(error))
                await asyncio.sleep(_PAUSES_S[min(attempts, len(_PAUSES_S) - 1)])
                attempts += 1
            else:
                return

    async def _least_busy(self) -> Container:
        """Waits while there is none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEAL_S):
                while not self.containers:
                    self._changed.clear()
                    await self._changed.wait()
        if not self.containers:
            raise SandboxFailure(f"no container: {self._cause}")
        return min(self.containers, key=lambda container: len(container.processes))

    async def _sweep(self, engine: DockerEngine) -> None:
        """Removes the containers whose owner has ended without them."""
        for left in await engine.owned():
            if is_gone(left.owner):
                try:
                    await engine.remove(left.id)
                except SandboxFailure as error:  # no reason not to start: the next one sweeps it
                    self._logger.error("container.not_swept", id=left.id[:12], cause=str(error))
                else:
                    self._logger.info("container.swept", id=left.id[:12])

    async def _watch_memory(self) -> None:
        while True:
            for container in self.containers:
                if container.asked >= _SILENCE_S / _MEMORY_EVERY_S:
                    self._logger.error("container.silent", id=container.id[:12])
                    container.give_up()
                else:
                    container.ask_for_memory()
            await asyncio.sleep(_MEMORY_EVERY_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end_of)

    def _note_end_of(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logger.error("container_host.failed", exc_info=error)


def docker_sandbox(config: SandboxConfig, seed: int = 0, run: str = "") -> ForkServerSandbox:
    return ForkServerSandbox(ContainerHost(config, run), config, seed)
