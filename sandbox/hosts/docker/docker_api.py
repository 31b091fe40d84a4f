"""Calls the Docker engine (API 1.41, aiodocker). The engine's JSON is used only in this file."""

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import msgspec
from aiodocker.containers import DockerContainer

from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.inside.isolation.allowed_syscalls import CALL_SYSCALLS, SETUP_SYSCALLS

_RUN_LABEL, _OWNER_LABEL = "asterism.run", "asterism.owner"
_MAX_CONCURRENT = 4  # concurrent starts and removals of containers
_REQUEST_TIMEOUT_S = 60.0  # aiodocker's default is no timeout
_REMOVAL_DELAYS_S = (0.0, 0.1, 0.5, 2.0)  # between attempts to remove a container
_NOBODY = "65534:65534"
_UNIX_ONLY = ("socket", "socketpair")
# System calls to start a fork server; with SETUP_SYSCALLS, the fork server isolates each call.
_START_SYSCALLS = ("connect", "mount_setattr", "pivot_root", "umount2")


class ContainerSpec(msgspec.Struct, frozen=True):
    image: str
    run: str  # label with the name of the run
    # Label with the owner that the container must not outlive (asterism.bus.process.scratch_lock).
    owner: str
    socket_folder: Path
    environment: dict[str, str]
    memory_mib: int
    max_processes: int
    file_mib: int
    cpuset: str


class OwnedContainer(msgspec.Struct, frozen=True):
    id: str
    owner: str


class DockerEngine:
    """A client of the engine. Every method raises SandboxFailure if the engine refuses or does not answer."""

    def __init__(self, address: str) -> None:
        self._docker = aiodocker.Docker(url=address, timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S))
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._apparmor = False

    async def query_info(self) -> None:
        """Check that the engine answers, and whether it uses AppArmor."""
        async with _as_sandbox_failure("query the engine"):
            info = await self._docker.system.info()
            self._apparmor = any("apparmor" in option for option in info.get("SecurityOptions") or [])

    async def has_image(self, name: str) -> bool:
        async with _as_sandbox_failure("look for the image"):
            try:
                await self._docker.images.inspect(name)
            except aiodocker.DockerError as error:
                if error.status == 404:
                    return False
                raise
            return True

    async def start(self, spec: ContainerSpec) -> str:
        """Start a container and return its id. On cancellation, remove the container."""
        async with self._slots, _as_sandbox_failure("start a container"):
            starting = asyncio.ensure_future(self._start(spec))
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                with contextlib.suppress(aiodocker.DockerError, aiohttp.ClientError, OSError):
                    await _remove(self._docker.containers.container(await starting))
                raise

    async def _start(self, spec: ContainerSpec) -> str:
        container = await self._docker.containers.create(self._build_config(spec))
        try:
            await container.start()
        except BaseException:
            # The first error counts, not an error of the removal.
            with contextlib.suppress(aiodocker.DockerError, aiohttp.ClientError, OSError):
                await _remove(container)
            raise
        return container.id

    async def remove(self, container_id: str) -> None:
        """Remove a container, running or not, and wait until the engine's list lacks it."""
        async with self._slots, _as_sandbox_failure("remove a container"):
            await _remove(self._docker.containers.container(container_id))

    async def list_owned(self) -> list[OwnedContainer]:
        """Return all containers of Asterism's sandboxes, of any owner.

        A restarted engine can list removed containers forever; a container without details does not exist.
        """
        async with _as_sandbox_failure("list the containers"):
            containers = await self._docker.containers.list(all=True, filters={"label": [_OWNER_LABEL]})
            return [
                OwnedContainer(container.id, container["Labels"][_OWNER_LABEL])
                for container in containers
                if await _exists(self._docker.containers.container(container.id))
            ]

    async def close(self) -> None:
        await self._docker.close()

    def _build_config(self, spec: ContainerSpec) -> dict[str, Any]:
        security = ["no-new-privileges:true", f"seccomp={_build_seccomp_profile()}"]
        if self._apparmor:
            # The default profile forbids mounts, also in a namespace.
            security.append("apparmor=unconfined")
        memory = spec.memory_mib << 20
        return {
            "Image": spec.image,
            "User": _NOBODY,
            "Env": [f"{name}={value}" for name, value in spec.environment.items()],
            "Labels": {_RUN_LABEL: spec.run, _OWNER_LABEL: spec.owner},
            "NetworkDisabled": True,
            "HostConfig": {
                "AutoRemove": True,
                "Binds": [f"{spec.socket_folder}:/run/asterism:ro"],
                "CapDrop": ["ALL"],
                "CpusetCpus": spec.cpuset,
                "IpcMode": "private",
                "LogConfig": {"Type": "none", "Config": {}},
                # Masked paths prevent mounting /proc in the pid namespace of a call. The calls themselves have no
                # /proc.
                "MaskedPaths": [],
                "Memory": memory,
                "MemorySwap": memory,
                "NetworkMode": "none",
                "PidsLimit": spec.max_processes,
                "ReadonlyPaths": [],
                "ReadonlyRootfs": True,
                "SecurityOpt": security,
                "Tmpfs": {"/tmp": f"size={spec.file_mib}m,nr_inodes=4096,mode=1777,nosuid,nodev,noexec"},
                "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            },
        }


async def _exists(container: DockerContainer) -> bool:
    try:
        await container.show()
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        return False
    return True


async def _remove(container: DockerContainer) -> None:
    """Repeat a removal that fails, for example because a restarted engine holds a mount."""
    for delay_s in (*_REMOVAL_DELAYS_S, None):
        try:
            await container.delete(force=True, v=True)
            return
        except aiodocker.DockerError as error:
            if error.status == 404:
                return
            if delay_s is None or (error.status < 500 and error.status != 409):
                raise
            if error.status == 409:  # removal in progress: the engine lists the container until the removal ends
                await _wait_until_removed(container)
        await asyncio.sleep(delay_s)


async def _wait_until_removed(container: DockerContainer) -> None:
    try:
        await container.wait(condition="removed", timeout=_REQUEST_TIMEOUT_S)
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise


@asynccontextmanager
async def _as_sandbox_failure(action: str) -> AsyncGenerator[None]:
    """Convert errors of the engine and of its connection into SandboxFailure."""
    try:
        yield
    except aiodocker.DockerError as error:
        raise SandboxFailure(f"cannot {action}: {error.message}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise SandboxFailure(f"cannot {action}: {error or type(error).__name__}") from error


def _build_seccomp_profile() -> str:
    """Return the seccomp profile as JSON. Denied calls fail with EPERM, clone3 with ENOSYS: libc then uses clone.

    The allowed mounts and namespaces give no rights outside the namespaces: the container has no
    capabilities. Each call denies them for itself (asterism.sandbox.inside.isolation.seccomp).
    """
    allowed = sorted({*CALL_SYSCALLS, *SETUP_SYSCALLS, *_START_SYSCALLS} - {*_UNIX_ONLY})
    unix_only = [{"index": 0, "value": int(socket.AF_UNIX), "op": "SCMP_CMP_EQ"}]
    rules = [
        {"names": allowed, "action": "SCMP_ACT_ALLOW"},
        {"names": list(_UNIX_ONLY), "action": "SCMP_ACT_ALLOW", "args": unix_only},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.EPERM, "syscalls": rules})
