"""A fake process, which exits at a call of `end`."""

from __future__ import annotations

import asyncio


class SimulatedProcess:
    """The used part of asyncio.subprocess.Process."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode

    def end(self, code: int) -> None:
        """Set the exit code, unless the process has exited."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()
