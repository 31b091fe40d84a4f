"""The sandbox without Docker: fork servers as processes of this machine, in namespaces where the kernel allows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from configs.schema import Sandbox as SandboxConfig
from sandbox.backend import ForkServerSandbox
from sandbox.contract import SandboxFailure
from sandbox.inside.command import ENVIRONMENT, python_command
from sandbox.inside.import_folders import import_folders
from sandbox.inside.settings import Settings

_ROOT = Path(__file__).resolve().parent.parent
# The base interpreter: a virtual environment's is not visible in the sandbox's root.
_PYTHON = os.path.realpath(sys.executable)
_MEMINFO = Path("/proc/meminfo")
_MEMORY = (
    "The memory of all calls together is not limited: "
    "run under a cgroup with a memory limit, or in containers, where many calls at their limit would not fit into memory."
)


class LocalProcess:
    """Implements sandbox.host.Launched."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self._process = process
        self.socket = ours

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # in namespaces it passes it on as a kill

    async def ended(self) -> None:
        """Waits without polling."""
        if self._process.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        with contextlib.suppress(ChildProcessError):
            self._process.wait()


class LocalHost:
    """Implements sandbox.host.Host."""

    async def start(self) -> None:
        return

    async def launch(self, module: str, settings: Settings) -> LocalProcess:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _cannot_start(error) from error
        ours.setblocking(False)
        settings = settings._replace(import_folders=import_folders())
        try:
            # The thread that starts it must live as long as it does: the kernel ends it with this thread.
            process = subprocess.Popen(  # noqa: ASYNC220
                python_command(_PYTHON, str(_ROOT), module, settings, theirs.fileno()),
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise _cannot_start(error) from error
        finally:
            theirs.close()
        return LocalProcess(process, ours)

    async def until_broken(self) -> NoReturn:
        """Never: a machine that starts no process now may start one later."""
        while True:
            await asyncio.Event().wait()

    def memory_share(self) -> float:
        """Of the machine's memory, by what the kernel says is available."""
        kib = {line.split(":")[0]: int(line.split()[1]) for line in _MEMINFO.read_text().splitlines()[:3]}
        return 1 - kib["MemAvailable"] / kib["MemTotal"]

    def about(self) -> tuple[str, tuple[str, ...]]:
        return "process", (_MEMORY,)

    async def close(self) -> None:
        return


def _cannot_start(error: OSError) -> SandboxFailure:
    return SandboxFailure(f"cannot start a sandbox process: {error.strerror}")


def process_sandbox(config: SandboxConfig, seed: int = 0) -> ForkServerSandbox:
    return ForkServerSandbox(LocalHost(), config, seed)
