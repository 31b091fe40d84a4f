"""The processes that a launcher starts, watches and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from bus.death import PARENT
from bus.last_words import words_of
from bus.messages import Shutdown
from bus.transport import Bus
from configs.run_folder import RunFolder


class ProcessDied(Exception):
    """A child ended before the run did. `str(error)` names it, and says what it printed last."""


class Child(NamedTuple):
    name: str
    process: asyncio.subprocess.Process
    output: Path  # what it printed
    words: Path | None = None  # why it ended, if it said so in memory (bus.last_words)


class Children:
    """Each child is a session of its own, so that a terminal's ^C reaches the launcher alone, and dies with it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._children: dict[str, Child] = {}
        self._logger = structlog.get_logger()

    async def spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Cancelled: the child is started all the same, and can be ended with the others."""
        starting = asyncio.ensure_future(self._start(name, argv, environment))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def _start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        output, words = self._folder.logs / f"{name}.out", words_of(self._folder, name)
        words.unlink(missing_ok=True)
        with output.open("ab") as stream:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bus.death", *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                start_new_session=True,
            )
        self._children[name] = child = Child(name, process, output, words)
        self._logger.info("process.started", name=name, pid=process.pid)
        return child

    def running(self, name: str) -> asyncio.subprocess.Process:
        return self._children[name].process

    def forget(self, name: str) -> None:
        """The child has done what it was started for, and ended."""
        del self._children[name]

    async def wait(self, name: str, seconds: float) -> bool:
        """Whether the child ended within so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._children[name].process.wait(), seconds)
        return self._children[name].process.returncode is not None

    async def kill(self, name: str) -> None:
        """End the child and all that it started."""
        process = self._children[name].process
        if process.returncode is None:
            self._logger.warning("process.killed", name=name, pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def end(self, bus: Bus, name: str, seconds: float) -> None:
        """Says Shutdown, and kills the child if it has not ended within so many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):  # its queue may be full; then it is killed below
            await asyncio.wait_for(bus.send(name, Shutdown()), timeout=0.5)
        await self.kill_after(name, seconds)

    async def terminate(self, name: str, seconds: float) -> None:
        """The same by signal, for one that is not on the bus."""
        with contextlib.suppress(ProcessLookupError):
            self._children[name].process.terminate()
        await self.kill_after(name, seconds)

    async def kill_after(self, name: str, seconds: float) -> None:
        """If the child has not ended by then."""
        if not await self.wait(name, seconds):
            await self.kill(name)

    def ended_badly(self) -> list[Child]:
        return [child for child in self._children.values() if child.process.returncode]

    @property
    def names(self) -> list[str]:
        return list(self._children)


def last_words(child: Child, lines: int = 12) -> str:
    """The end of what a child printed, or what it said in memory where the disk had no room for that."""
    text = child.output.read_text(errors="replace").rstrip() if child.output.exists() else ""
    printed = "\n".join(text.splitlines()[-lines:])
    words = words_in_memory(child)
    return printed if words in printed else words


def words_in_memory(child: Child) -> str:
    """Why it could not go on, as it said where a full disk does not matter; nothing if it said nothing."""
    return child.words.read_text().rstrip() if child.words is not None and child.words.exists() else ""


def ended_with(child: Child) -> str:
    return f"{child.name} ended with exit code {child.process.returncode}"


def death_of(child: Child, how: str = "") -> ProcessDied:
    """What to tell of a child that has ended and should not have."""
    return ProcessDied(
        f"{child.name} ended {how}with exit code {child.process.returncode}:\n{last_words(child)}\n"
        f"({child.output}; --resume goes on from the last checkpoint)"
    )


def threads(count: int) -> Mapping[str, str]:
    """Threads that wait sleep: there are more processes than cores, and one that spins takes another's time."""
    return {
        "OMP_NUM_THREADS": str(count),
        "OPENBLAS_NUM_THREADS": str(count),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
    }
