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
        """The pid on this machine. With namespaces, it is the pid of the serving process's parent."""
        ...

    def kill(self) -> None:
        """Kill the process and its descendants."""
        ...

    async def wait(self) -> None:
        """Wait until the process has exited and is reaped."""
        ...


class Host(Protocol):
    async def start(self) -> None:
        """Start the host. Raises SandboxFailure with a remedy if no process can run on it."""
        ...

    async def launch(self, module: str, settings: ServerSettings) -> LaunchedProcess:
        """Launch `module`; the host fills in `settings.import_folders`. Raises SandboxFailure."""
        ...

    async def wait_until_broken(self) -> NoReturn:
        """Wait until no process can be launched any more and retries do not help; then raise SandboxFailure."""
        ...

    def get_excess_memory(self, share: float) -> int:
        """Return the memory in use beyond `share` of the memory available to calls, in bytes; may be negative."""
        ...

    def describe(self) -> tuple[str, tuple[str, ...]]:
        """Return (name of the backend, a sentence with a remedy for each missing protection)."""
        ...

    async def close(self) -> None:
        """Close the host; no process, container, file or socket remains."""
        ...
