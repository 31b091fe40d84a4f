"""Fakes for tests of the launcher: a display, and child processes that exit when `end` is called."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from asterism.actors.launch.child_processes import ChildProcess, ChildProcesses
from asterism.bus.messages import Progress
from asterism.configs.run_folder import RunFolder


class SimulatedProcess:
    """A fake asyncio.subprocess.Process with the attributes that the product uses."""

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


class SimulatedStart(NamedTuple):
    time: float  # seconds on the clock of the event loop
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]


class SimulatedChildren(ChildProcesses):
    """Records the processes instead of starting them. Their output files are in `outputs`."""

    def __init__(self, outputs: Path) -> None:
        super().__init__(RunFolder(outputs))
        self._outputs = outputs
        self.started: list[SimulatedStart] = []
        self.processes: dict[str, SimulatedProcess] = {}  # latest incarnation by process name

    async def spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
        self.started.append(SimulatedStart(asyncio.get_running_loop().time(), name, argv, environment))
        process = self.processes[name] = self.start_process(name, argv)
        output, reason = self._outputs / f"{name}.out", self._outputs / f"{name}.exit"
        child = ChildProcess(name, process, output, reason)  # pyright: ignore[reportArgumentType]
        self._children[name] = child
        return child

    def start_process(self, name: str, argv: Sequence[str]) -> SimulatedProcess:
        return SimulatedProcess()

    async def kill(self, name: str) -> None:
        self.processes[name].end(-9)

    def list_starts(self, name: str) -> list[SimulatedStart]:
        return [start for start in self.started if start.name == name]


class RecordedDisplay:
    """Records the printed lines and shows no progress."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)

    def show_progress(self, progress: Progress) -> None: ...

    def close(self) -> None: ...
