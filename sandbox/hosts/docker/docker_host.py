"""Runs fork servers in one or more containers on this machine.

    this process -> engine   create, start and remove containers; a label names the owner of a container
    init process -> gate     the first process of a container connects to a socket in a mounted folder
    fork servers -> gate     they connect directly; calls and answers do not pass through the engine

A lost container is replaced, with increasing delays while the engine refuses; calls in flight in it
raise SandboxFailure. When this process exits, the init processes lose their connections and the
containers end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from asterism.bus.process.scratch_lock import has_owner_ended
from asterism.bus.process.waiting import cancel_tasks, start_task
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.docker.connection_gate import ConnectionGate
from asterism.sandbox.hosts.docker.container import Container, ContainerProcess
from asterism.sandbox.hosts.docker.docker_probe import get_engine_address, probe_docker
from asterism.sandbox.inside.container_init import SECRET_VARIABLE
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.inside.wire.server_settings import ServerSettings

if TYPE_CHECKING:
    from asterism.sandbox.hosts.docker.docker_api import ContainerSpec, DockerEngine

REPOSITORY = "asterism-sandbox"  # name of the images
_SANDBOX_FOLDER = Path(__file__).resolve().parents[2]
_CONNECT_TIMEOUT_S = 30.0  # time from the start of a container to the handshake of its init process
_LAUNCH_TIMEOUT_S = 30.0  # a launch waits this long for a container
_RETRY_DELAYS_S = (0.1, 0.3, 1.0, 3.0, 5.0)  # pauses before attempts to replace a container; the last one repeats
_MEMORY_POLL_S = 0.1
_CONTAINER_POLL_S = 0.5  # interval of `wait_until_broken`
_HEARTBEAT_TIMEOUT_S = 60.0  # time without an answer after which a frozen container is replaced


def read_sources(folder: Path = _SANDBOX_FOLDER) -> dict[str, bytes]:
    """Return the sources of the image: file contents by path relative to `folder` (sandbox/)."""
    build_files = ("Dockerfile", "requirements.txt", "image_context.py", "finish_image.py")
    names = [*(f"image/{name}" for name in build_files), "__init__.py"]
    inside = sorted((folder / "inside").rglob("*.py"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in [*(folder / name for name in names), *inside]}


def compute_image_name(files: dict[str, bytes] | None = None) -> str:
    """Return name and tag. The tag is a digest of `files` (default: `read_sources()`)."""
    digest = hashlib.blake2b(digest_size=6)
    for name, content in (read_sources() if files is None else files).items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"{REPOSITORY}:{digest.hexdigest()}"


class ContainerHost:
    """Implements asterism.sandbox.hosts.host.Host."""

    def __init__(self, config: SandboxConfig, run: str) -> None:
        self._config = config
        self._run = run
        self._image = config.image or compute_image_name()
        self.gate = ConnectionGate(self._on_connection)
        self._engine: DockerEngine | None = None
        # Init processes that have not connected yet, by the container's secret.
        self._pending_connections: dict[str, asyncio.Future[socket.socket]] = {}
        self._containers_by_secret: dict[str, Container] = {}
        self._containers: list[Container] = []
        self._container_added = asyncio.Event()
        self._last_failure = ""  # the reason if there is no container
        self._closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._logger = structlog.get_logger()

    @property
    def live_containers(self) -> list[Container]:
        return [container for container in self._containers if container.alive]

    async def start(self) -> None:
        self._closing = False  # True if `close` ran after a failed start
        probe = await asyncio.to_thread(probe_docker, os.environ)
        if probe.remedy:
            raise SandboxFailure(f"no Docker engine: {probe.description}. {probe.remedy}")
        self._engine = _connect_engine()
        await self._engine.query_info()
        await _remove_stale(self._engine)
        if not await self._engine.has_image(self._image):
            raise SandboxFailure(f"no image {self._image}: run `make sandbox-image`, or `make sandbox-image-local`")
        self.gate.open()
        starts = [self._start_container(self._engine) for _ in range(self._config.containers)]
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        self._spawn(self._poll_memory())

    async def launch(self, module: str, settings: ServerSettings) -> ContainerProcess:
        container = await self._wait_for_least_busy()
        return await container.launch(module, settings)

    async def wait_until_broken(self) -> NoReturn:
        """Raise SandboxFailure after `container_timeout_s` without a container."""
        loop = asyncio.get_running_loop()
        last_alive_at = loop.time()
        while loop.time() - last_alive_at < self._config.container_timeout_s:
            await asyncio.sleep(_CONTAINER_POLL_S)
            if self.live_containers:
                last_alive_at = loop.time()
        raise SandboxFailure(f"no container for {self._config.container_timeout_s:g} s: {self._last_failure}")

    def get_excess_memory(self, share: float) -> int:
        """Return the largest memory excess of a live container."""
        uses = [(container.memory_used, container.memory_limit) for container in self.live_containers]
        return max((used - int(share * limit) for used, limit in uses), default=0)

    def describe(self) -> tuple[str, tuple[str, ...]]:
        return "docker", ()

    async def close(self) -> None:
        self._closing = True
        await cancel_tasks(*self._tasks)
        for container in self._containers:
            container.close()
        if self._engine is not None:
            removals = [self._engine.remove(container.id) for container in self._containers]
            await asyncio.gather(
                *removals, return_exceptions=True
            )  # without an engine, the closed connections end the containers
            await self._engine.close()
        await self.gate.close()

    # ------------------------------------------------------------ containers

    async def _start_container(self, engine: DockerEngine) -> None:
        """Start a container and wait for the connection of its init process."""
        secret = secrets.token_hex(16)
        arrival = self._pending_connections[secret] = asyncio.get_running_loop().create_future()
        try:
            container_id = await engine.start(self._build_spec(secret))
            try:
                connection = await asyncio.wait_for(arrival, _CONNECT_TIMEOUT_S)
            except BaseException as error:
                # A failed removal must not hide a cancellation.
                with contextlib.suppress(SandboxFailure):
                    await engine.remove(container_id)
                if isinstance(error, TimeoutError):
                    raise SandboxFailure("the container's init process did not connect") from None
                raise
        except BaseException:
            if arrival.done() and not arrival.cancelled():  # the init process was faster than the engine's answer
                arrival.result().close()
            raise
        finally:
            del self._pending_connections[secret]
        container = Container(container_id, self._on_container_end)
        self._containers_by_secret[secret] = container
        self._containers.append(container)
        await container.attach(connection)
        self._container_added.set()
        self._logger.info("container.started", id=container_id[:12], image=self._image, pid=container.pid)

    def _build_spec(self, secret: str) -> ContainerSpec:
        from asterism.sandbox.hosts.docker.docker_api import ContainerSpec

        config = self._config
        return ContainerSpec(
            image=self._image,
            run=self._run,
            owner=self.gate.owner,
            socket_folder=self.gate.folder,
            environment={SECRET_VARIABLE: secret},
            memory_mib=config.container_memory_mib,
            max_processes=config.container_processes,
            file_mib=config.file_mib,
            cpuset=config.cpuset,
        )

    def _on_connection(self, frame: Frame, connection: socket.socket) -> bool:
        secret = str(frame.get("secret"))
        if "token" not in frame:
            arrival = self._pending_connections.get(secret)
            if arrival is None or arrival.done():
                return False
            arrival.set_result(connection)
            return True
        container = self._containers_by_secret.get(secret)
        process = container.processes.get(frame["token"]) if container is not None else None
        if process is None:
            return False
        process.set_connection(connection)
        return True

    def _on_container_end(self, container: Container) -> None:
        self._containers_by_secret = {
            secret: other for secret, other in self._containers_by_secret.items() if other is not container
        }
        if not self._closing:
            self._logger.error("container.lost", id=container.id[:12])
            self._spawn(self._replace(container))

    async def _replace(self, lost: Container) -> None:
        assert self._engine is not None
        attempts = 0
        self._last_failure = "the last container ended and has not been replaced yet"
        try:
            await self._engine.remove(lost.id)
        except SandboxFailure as error:  # the next start removes the container by its label
            self._logger.error("container.not_removed", id=lost.id[:12], cause=str(error))
        self._containers.remove(lost)  # only now, so that `close` repeats a cancelled removal
        while not self._closing:
            try:
                await self._start_container(self._engine)
            except SandboxFailure as error:
                self._last_failure = str(error)
                self._logger.error("container.not_replaced", id=lost.id[:12], cause=str(error))
                await asyncio.sleep(_RETRY_DELAYS_S[min(attempts, len(_RETRY_DELAYS_S) - 1)])
                attempts += 1
            else:
                return

    async def _wait_for_least_busy(self) -> Container:
        """Return the live container with the fewest processes; raise SandboxFailure after `_LAUNCH_TIMEOUT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAUNCH_TIMEOUT_S):
                while not self.live_containers:
                    self._container_added.clear()
                    await self._container_added.wait()
        if not self.live_containers:
            raise SandboxFailure(f"no container: {self._last_failure}")
        return min(self.live_containers, key=lambda container: len(container.processes))

    async def _poll_memory(self) -> None:
        while True:
            for container in self.live_containers:
                if container.unanswered_requests >= _HEARTBEAT_TIMEOUT_S / _MEMORY_POLL_S:
                    self._logger.error("container.heartbeat_timed_out", id=container.id[:12])
                    container.abort()
                else:
                    container.request_memory_use()
            await asyncio.sleep(_MEMORY_POLL_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        start_task(self._tasks, work).add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logger.error("container_host.failed", exc_info=error)


def _connect_engine() -> DockerEngine:
    """Connect to the engine. Raises SandboxFailure if a required package is missing."""
    try:
        from asterism.sandbox.hosts.docker.docker_api import (
            DockerEngine,  # a machine without containers needs no aiodocker
        )
    except ModuleNotFoundError as error:
        raise SandboxFailure(f"containers need the package {error.name}: install it, or set sandbox.backend") from error
    return DockerEngine(get_engine_address(os.environ))


async def remove_stale_containers() -> int:
    """Remove the containers of ended owners, if an engine answers; return their number. Raises SandboxFailure."""
    if (await asyncio.to_thread(probe_docker, os.environ)).remedy:
        return 0
    engine = _connect_engine()
    try:
        return await _remove_stale(engine)
    finally:
        await engine.close()


async def _remove_stale(engine: DockerEngine) -> int:
    num_removed = 0
    for container in await engine.list_owned():
        if has_owner_ended(container.owner):
            try:
                await engine.remove(container.id)
            except SandboxFailure as error:  # not fatal: the next start removes the container
                structlog.get_logger().error("container.not_swept", id=container.id[:12], cause=str(error))
            else:
                num_removed += 1
                structlog.get_logger().info("container.swept", id=container.id[:12])
    return num_removed
