"""A stall watchdog reports a run without progress, and lists from the event logs the actors that wait."""

import asyncio
import sys
import time

import structlog

from asterism.actors.launch.display import Display
from asterism.configs.run_folder import RunFolder


class StallWatchdog:
    """A watchdog that reports each actor's wait whenever `stall_s` pass without a line of progress or an answer."""

    def __init__(self, folder: RunFolder, stall_s: float, display: Display) -> None:
        self._folder = folder
        self._stall_s = stall_s
        self._display = display
        self._progressed = asyncio.Event()
        self._logger = structlog.get_logger()

    def on_progress(self) -> None:
        self._progressed.set()

    async def watch(self) -> None:
        while True:
            self._progressed.clear()
            try:
                await asyncio.wait_for(self._progressed.wait(), self._stall_s)
            except TimeoutError:
                if not self._has_new_answers():
                    await self._report()

    def _has_new_answers(self) -> bool:
        """Return whether an evaluation has a new answer: a long evaluation shows no progress until its end."""
        path = self._folder.answers
        return path.exists() and time.time() - path.stat().st_mtime < self._stall_s

    async def _report(self) -> None:
        """Run `asterism log waits` in a separate process, since reading the logs can take long."""
        command = (sys.executable, "-P", "-m", "asterism.actors.cli.log.waits_command", str(self._folder.path))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        try:
            waits, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        report_lines = waits.decode().splitlines() or [errors.decode()[-1000:] or "no waiting actor found in the logs"]
        self._logger.warning("run.stalled", stalled_s=self._stall_s, waits=report_lines)
        self._display.print_line(f"no progress for {self._stall_s:g} s:")
        for line in report_lines:
            self._display.print_line(f"  {line}")
