"""The interface of hosts, which run fork servers and graders on this machine or in containers."""

import socket
from typing import NoReturn, Protocol

from asterism.sandbox.inside.wire.server_settings import ServerSettings


class LaunchedProcess(Protocol):
    """A launched process and the socket to it, which closes when the process exits."""

    @property
    def socket(self) -> socket.socket: ...

    @property
    def pid(self) -> int:
        """In this machine's pid namespace. With namespaces, the parent of the serving process."""
        ...

    def kill(self) -> None:
        """Kills the process and its descendants."""
        ...

    async def wait(self) -> None:
        """Returns when the process has exited and is reaped."""
        ...


class Host(Protocol):
    async def start(self) -> None:
        """Raises SandboxFailure with a remedy if no process can run on this host."""
        ...

    async def launch(self, module: str, settings: ServerSettings) -> LaunchedProcess:
        """The host fills in `settings.import_folders`. Raises SandboxFailure."""
        ...

    async def wait_until_broken(self) -> NoReturn:
        """Raises SandboxFailure when no process can be launched any more and retries do not help."""
        ...

    def get_excess_memory(self, share: float) -> int:
        """Memory in use, beyond `share` of the memory available to calls, in bytes; may be negative."""
        ...

    def describe(self) -> tuple[str, tuple[str, ...]]:
        """(name of the backend, a sentence with a remedy for each missing protection)."""
        ...

    async def close(self) -> None:
        """Leaves no process, container, file or socket behind."""
        ...
