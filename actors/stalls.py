"""A run that makes no progress says who waits for whom: by itself, after a stated time, and again after as long."""

from __future__ import annotations

import asyncio
import sys

import structlog

from actors.display import Display
from configs.run_folder import RunFolder


class Stalls:
    """Progress is a line of the display: a step of the cold start or of reinforcement learning, or an evaluation."""

    def __init__(self, folder: RunFolder, stall_s: float, display: Display) -> None:
        self._folder = folder
        self._stall_s = stall_s
        self._display = display
        self._moved = asyncio.Event()
        self._logger = structlog.get_logger()

    def moved(self) -> None:
        self._moved.set()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), self._stall_s)
            except TimeoutError:
                await self._report()

    async def _report(self) -> None:
        """Reading the logs again may take long, so a process of its own does it."""
        command = (sys.executable, "-m", "actors.waits", str(self._folder.path))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        try:
            waits, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        told = waits.decode().splitlines() or [complaint.decode()[-1000:] or "the logs know of nobody who waits"]
        self._logger.warning("run.stalled", stalled_s=self._stall_s, waits=told)
        self._display.say(f"no progress for {self._stall_s:g} s:")
        for line in told:
            self._display.say(f"  {line}")
