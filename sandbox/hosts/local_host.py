"""Launches fork servers as processes of this machine, in namespaces if the kernel allows them."""

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import asterism
from asterism.bus.process.scratch_lock import holding_scratch, link_cgroup, name_scratch, remove_stale_scratch
from asterism.bus.process.waiting import wait_for_exit
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.hosts.cgroup_folders import CgroupFolder
from asterism.sandbox.hosts.user_maps import answer_map_request, may_map_users, offer_users
from asterism.sandbox.inside.isolation.kernel_users import get_first_user
from asterism.sandbox.inside.isolation.namespaces import NOBODY
from asterism.sandbox.inside.wire.command import ENVIRONMENT, build_python_command, list_import_folders
from asterism.sandbox.inside.wire.server_settings import ServerSettings

_ROOT = Path(str(asterism.__file__)).resolve().parents[1]
# The base interpreter: the sandbox's root contains no virtual environment.
_PYTHON = os.path.realpath(sys.executable)
_MEMINFO = Path("/proc/meminfo")
_MEMORY_WARNING = (
    "The total memory of all calls is not limited: "
    "if many calls at their limit would not fit into memory, run under a cgroup with a memory limit, or in containers."
)


class LocalProcess:
    """Implements asterism.sandbox.hosts.host.LaunchedProcess."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self._process = process
        self.socket = connection

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()  # the terminated process kills its child, if there are namespaces

    async def wait(self) -> None:
        if self._process.poll() is None:
            await wait_for_exit(self._process.pid)
        with contextlib.suppress(ChildProcessError):
            self._process.wait()


class LocalHost:
    """Implements asterism.sandbox.hosts.host.Host."""

    def __init__(self) -> None:
        self._scratch = ExitStack()
        self._environment = ENVIRONMENT
        self._cgroups: CgroupFolder | None = None

    async def start(self) -> None:
        """Start the host and remove the scratch folders of ended owners. Raises SandboxFailure."""
        remove_stale_scratch()
        path = Path(tempfile.gettempdir()) / name_scratch(f"calls-{secrets.token_hex(4)}")
        try:
            self._scratch.enter_context(holding_scratch(path)).chmod(0o711)  # a root executor runs calls as other users
        except OSError as error:
            raise _make_start_failure(error) from error
        self._environment = {**ENVIRONMENT, "TMPDIR": str(path)}
        with contextlib.suppress(OSError):  # without permission, the fork servers measure memory
            self._cgroups = CgroupFolder(os.getpid(), path.name)
            link_cgroup(path, self._cgroups.path)

    async def launch(self, module: str, settings: ServerSettings) -> LocalProcess:
        use_cgroups = self._cgroups is not None and settings.preload != "grader"
        use_users = settings.namespaces and settings.preload != "grader" and may_map_users(os.getpid())
        settings = settings._replace(
            import_folders=list_import_folders(), kernel_users=use_users, call_cgroups=use_cgroups
        )
        process, connection = self._spawn(module, settings)
        if use_users:
            offer_users(connection, process.pid)
        if self._cgroups is not None and use_cgroups:
            owner = NOBODY if settings.namespaces and os.getuid() == 0 else os.getuid()
            self._cgroups.hand_over(process.pid, get_first_user(process.pid) if use_users else owner, connection)
        launched = LocalProcess(process, connection)
        if use_users:
            try:
                await answer_map_request(connection, process.pid)
            except BaseException:  # cancelled: no other object refers to the process
                connection.close()
                launched.kill()
                await launched.wait()
                raise
        return launched

    def _spawn(self, module: str, settings: ServerSettings) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a process; return it and this end of its socket. Raises SandboxFailure."""
        try:
            connection, child_end = socket.socketpair()
        except OSError as error:
            raise _make_start_failure(error) from error
        connection.setblocking(False)
        try:
            # The starting thread must outlive the process: the kernel kills the process when this
            # thread exits.
            process = subprocess.Popen(
                build_python_command(_PYTHON, str(_ROOT), module, settings, child_end.fileno()),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                cwd="/",
                start_new_session=True,  # set before exec: otherwise, ^C in the executor's terminal ends the new server
            )
        except OSError as error:
            connection.close()
            raise _make_start_failure(error) from error
        finally:
            child_end.close()
        return process, connection

    async def wait_until_broken(self) -> NoReturn:
        """Wait for ever: a machine that cannot start a process now may start one later."""
        while True:
            await asyncio.Event().wait()

    def get_excess_memory(self, share: float) -> int:
        """Compute the excess of the machine from the kernel's MemAvailable; return 0 if no descriptor is free."""
        try:
            lines = _MEMINFO.read_text().splitlines()[:3]
        except OSError:
            return 0
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return int((1 - share) * kib["MemTotal"] - kib["MemAvailable"]) * 1024

    def describe(self) -> tuple[str, tuple[str, ...]]:
        return "process", (_MEMORY_WARNING,)

    async def close(self) -> None:
        self._scratch.close()


def _make_start_failure(error: OSError) -> SandboxFailure:
    return SandboxFailure(f"cannot start a sandbox process: {error.strerror}")
