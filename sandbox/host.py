"""Where fork servers and graders run: on this machine (`local_host`) or in containers (`container_host`)."""

from __future__ import annotations

import socket
from typing import NoReturn, Protocol

from sandbox.inside.settings import Settings


class Launched(Protocol):
    """A process that was started, and the socket to it. Its end closes the socket's other end."""

    @property
    def socket(self) -> socket.socket: ...

    @property
    def pid(self) -> int:
        """As this machine numbers it; in namespaces it is the parent of the one that serves."""
        ...

    def kill(self) -> None:
        """At once, and all that it started."""
        ...

    async def ended(self) -> None:
        """Returns when it has ended and is reaped."""
        ...


class Host(Protocol):
    async def start(self) -> None:
        """Raises SandboxFailure with a remedy if nothing can be run here."""
        ...

    async def launch(self, module: str, settings: Settings) -> Launched:
        """`settings.import_folders` is the host's to fill. Raises SandboxFailure."""
        ...

    async def until_broken(self) -> NoReturn:
        """Raises SandboxFailure when nothing can be launched any more, and nobody here can mend it."""
        ...

    def memory_share(self) -> float:
        """How much of the memory that calls may take is in use: 0 to 1."""
        ...

    def about(self) -> tuple[str, tuple[str, ...]]:
        """(backend's name, one sentence for each protection that is not in force, with its remedy)."""
        ...

    async def close(self) -> None:
        """Leaves no process, container, file or socket behind."""
        ...
