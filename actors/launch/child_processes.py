"""A launcher starts, monitors and stops its processes with this class."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from asterism.actors.launch.heartbeat_watch import Hang, HeartbeatWatch
from asterism.bus.bus import Bus
from asterism.bus.messages import Shutdown
from asterism.bus.process.exit_reason import exit_reason_path, read_exit_reason
from asterism.bus.process.parent_death import PARENT_PID_VARIABLE
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import SupervisionConfig

SPINS = "10000"  # a waiting OpenMP thread spins so often before it sleeps, for some 50 microseconds


class ProcessDied(Exception):
    """A child ended before the run did. `str(error)` has its name and its last output."""


class ChildProcess(NamedTuple):
    name: str
    process: asyncio.subprocess.Process
    output_path: Path  # file of stdout and stderr
    exit_reason_path: Path  # file on a tmpfs (asterism.bus.process.exit_reason)


class ChildProcesses:
    """Children of a launcher. A child dies with the launcher, and has its own session: ^C reaches only the launcher."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._children: dict[str, ChildProcess] = {}
        self._logger = structlog.get_logger()

    async def spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
        """Start a child. A cancelled call starts it nevertheless, so that it can be stopped with the others."""
        starting = asyncio.ensure_future(self._start(name, argv, environment))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def _start(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
        output, reason_path = self._folder.logs / f"{name}.out", exit_reason_path(self._folder, name)
        reason_path.unlink(missing_ok=True)
        with output.open("ab") as stream:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "asterism.bus.process.parent_death", *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **environment, PARENT_PID_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        self._children[name] = child = ChildProcess(name, process, output, reason_path)
        self._logger.info("process.started", name=name, pid=process.pid)
        return child

    def remove(self, name: str) -> None:
        """Remove a child that has ended as expected; list_failed then leaves it out."""
        del self._children[name]

    async def wait_for_exit(self, name: str, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._children[name].process.wait(), timeout_s)
        return self._children[name].process.returncode is not None

    async def kill(self, name: str) -> None:
        process = self._children[name].process
        if process.returncode is None:
            self._logger.warning("process.killed", name=name, pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def watch_heartbeats(self, senders: Sequence[str], incarnation: int, settings: SupervisionConfig) -> HeartbeatWatch:
        return HeartbeatWatch(senders, incarnation, settings, self._folder)

    async def kill_hung(self, name: str, hang: Hang) -> None:
        """Kill a child that hangs, even if it is a stopped process; learner ranks die with torchrun's agent."""
        self._logger.error("process.timed_out", name=name, cause=hang.cause, hung_s=round(hang.duration_s, 1))
        await self.kill(name)

    async def shut_down(self, bus: Bus, name: str, timeout_s: float) -> None:
        """Send Shutdown, and kill the child if it does not end within `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):  # a child with a full queue is killed below
            await asyncio.wait_for(bus.send(name, Shutdown()), timeout=0.5)
        await self.kill_after(name, timeout_s)

    async def terminate(self, name: str, timeout_s: float) -> None:
        """Send SIGTERM to a child that is not on the bus, and kill it if it does not end within `timeout_s`."""
        with contextlib.suppress(ProcessLookupError):
            self._children[name].process.terminate()
        await self.kill_after(name, timeout_s)

    async def kill_after(self, name: str, timeout_s: float) -> None:
        if not await self.wait_for_exit(name, timeout_s):
            await self.kill(name)

    def list_running(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.process.returncode is None]

    def list_failed(self) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.process.returncode]

    @property
    def names(self) -> list[str]:
        return list(self._children)


def describe_exit(child: ChildProcess) -> str:
    code = child.process.returncode or 0
    return f"{child.name} " + (f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")


def build_process_died_error(child: ChildProcess, how: str = "") -> ProcessDied:
    reason = read_exit_reason(child.output_path, child.exit_reason_path)
    return ProcessDied(
        f"{child.name} ended {how}with exit code {child.process.returncode}:\n{reason}\n"
        f"({child.output_path}; --resume continues from the last checkpoint)"
    )


def build_thread_environment(count: int) -> Mapping[str, str]:
    """Build variables with which waiting threads spin for a short time and then sleep.

    There are more processes than cores, so threads must not spin for long. A thread that sleeps at once wakes up too
    late for the next of an engine's many small operations: a step of 64 sequences then takes 1.6 times as long.
    """
    return {
        "OMP_NUM_THREADS": str(count),
        "OPENBLAS_NUM_THREADS": str(count),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": SPINS,
        "PYTHONUNBUFFERED": "1",
    }
