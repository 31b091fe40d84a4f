"""A process that is none: it ends when it is told to."""

from __future__ import annotations

import asyncio


class SimulatedProcess:
    """As much of asyncio.subprocess.Process as is looked at."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def end(self, code: int) -> None:
        """The first one counts."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()
