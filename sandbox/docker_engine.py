"""The Docker engine, as far as the sandbox needs it: the only file that knows the engine's JSON (API 1.41, aiodocker)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import msgspec
from aiodocker.containers import DockerContainer

from sandbox.contract import SandboxFailure

_RUN, _OWNER = "asterism.run", "asterism.owner"
_AT_ONCE = 4  # containers that start or stop at the same time
_ANSWER_S = 60.0  # for the engine to do what it was asked; by itself the client would wait without end
_NOBODY = "65534:65534"


class ContainerSpec(msgspec.Struct, frozen=True):
    image: str
    run: str  # label: the run that it belongs to
    owner: str  # label: the process that it must not outlive (see sandbox.owner)
    socket_folder: Path
    environment: dict[str, str]
    memory_mib: int
    processes: int
    file_mib: int
    cpuset: str
    seccomp: str  # JSON


class Owned(msgspec.Struct, frozen=True):
    id: str
    owner: str


class DockerEngine:
    """Raises SandboxFailure wherever the engine refuses or does not answer."""

    def __init__(self, address: str) -> None:
        self._docker = aiodocker.Docker(url=address, timeout=aiohttp.ClientTimeout(total=_ANSWER_S))
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._apparmor = False

    async def look(self) -> None:
        """Asks what the engine is; raises SandboxFailure if there is none."""
        async with _said("ask the engine"):
            info = await self._docker.system.info()
            self._apparmor = any("apparmor" in option for option in info.get("SecurityOptions") or [])

    async def has_image(self, name: str) -> bool:
        async with _said("look for the image"):
            try:
                await self._docker.images.inspect(name)
            except aiodocker.DockerError as error:
                if error.status == 404:
                    return False
                raise
            return True

    async def start(self, spec: ContainerSpec) -> str:
        """The id of a container that runs. Cancelled: removes the container that the engine makes all the same."""
        async with self._room, _said("start a container"):
            starting = asyncio.ensure_future(self._start(spec))
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                with contextlib.suppress(aiodocker.DockerError, aiohttp.ClientError, OSError):
                    await _remove(self._docker.containers.container(await starting))
                raise

    async def _start(self, spec: ContainerSpec) -> str:
        container = await self._docker.containers.create(self._config(spec))
        try:
            await container.start()
        except BaseException:
            with contextlib.suppress(aiodocker.DockerError, aiohttp.ClientError, OSError):  # the first error counts
                await _remove(container)
            raise
        return container.id

    async def remove(self, container_id: str) -> None:
        """Also if it runs, and if it is gone already."""
        async with self._room, _said("remove a container"):
            await _remove(self._docker.containers.container(container_id))

    async def owned(self) -> list[Owned]:
        """All containers of this project's sandboxes, whoever started them."""
        async with _said("list the containers"):
            found = await self._docker.containers.list(all=True, filters={"label": [_OWNER]})
            return [Owned(container.id, container["Labels"][_OWNER]) for container in found]

    async def close(self) -> None:
        await self._docker.close()

    def _config(self, spec: ContainerSpec) -> dict[str, Any]:
        security = ["no-new-privileges:true", f"seccomp={spec.seccomp}"]
        if self._apparmor:
            security.append("apparmor=unconfined")  # its default profile forbids all mounts, also those in a namespace
        memory = spec.memory_mib << 20
        return {
            "Image": spec.image,
            "User": _NOBODY,
            "Env": [f"{name}={value}" for name, value in spec.environment.items()],
            "Labels": {_RUN: spec.run, _OWNER: spec.owner},
            "NetworkDisabled": True,
            "HostConfig": {
                "AutoRemove": True,
                "Binds": [f"{spec.socket_folder}:/run/asterism:ro"],
                "CapDrop": ["ALL"],
                "CpusetCpus": spec.cpuset,
                "IpcMode": "private",
                "LogConfig": {"Type": "none", "Config": {}},
                "MaskedPaths": [],  # a call's pid namespace cannot have a /proc of its own otherwise; no call sees one
                "Memory": memory,
                "MemorySwap": memory,
                "NetworkMode": "none",
                "PidsLimit": spec.processes,
                "ReadonlyPaths": [],
                "ReadonlyRootfs": True,
                "SecurityOpt": security,
                "Tmpfs": {"/tmp": f"size={spec.file_mib}m,nr_inodes=4096,mode=1777,nosuid,nodev,noexec"},
                "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            },
        }


async def _remove(container: DockerContainer) -> None:
    try:
        await container.delete(force=True, v=True)
    except aiodocker.DockerError as error:
        if error.status not in (404, 409):  # gone, or going
            raise


@asynccontextmanager
async def _said(what: str) -> AsyncGenerator[None]:
    """What the engine or the way to it says, as SandboxFailure."""
    try:
        yield
    except aiodocker.DockerError as error:
        raise SandboxFailure(f"cannot {what}: {error.message}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise SandboxFailure(f"cannot {what}: {error or type(error).__name__}") from error
