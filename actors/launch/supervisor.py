"""A supervisor starts each process, and restarts it after it dies or is killed because it hangs.

Each start is an incarnation. The pause before a restart doubles with each consecutive failure; too many of them, or two
with the same exception, end the run. `Program.on_exit` notifies other processes before the next incarnation starts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import NoReturn

import msgspec
import structlog

from asterism.actors.launch.child_processes import (
    ChildProcess,
    ChildProcesses,
    build_process_died_error,
    build_thread_environment,
    describe_exit,
)
from asterism.actors.launch.heartbeat_watch import Hang, HeartbeatWatch
from asterism.bus.process.exit_reason import ExitReason, load_exit_reason
from asterism.bus.process.heartbeat import Heartbeat
from asterism.bus.process.waiting import cancel_tasks
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.schema.machines import SupervisionConfig


def is_unusable_exit(incarnation: int, child: ChildProcess) -> bool:
    """Return whether the process cannot use its input (file, setting, disk): a restart would fail in the same way.

    Several learner ranks have the exit code of torchrun, whatever their own exit codes are.
    """
    reason = load_exit_reason(child.exit_reason_path)
    return child.process.returncode == EXIT_UNUSABLE or (reason is not None and reason.kind == "unusable_input")


class Program(msgspec.Struct, frozen=True):
    """A process's command line, and the rules of its restarts."""

    build_argv: Callable[[int], Sequence[str]]  # builds the command line of an incarnation
    threads: int = 1
    environment: Mapping[str, str] = {}
    heartbeat_senders: Sequence[str] = ()  # processes that must send heartbeats; empty: the process itself
    resets_failures: bool = True  # failures reset after supervision.failure_reset_s; False: only by mark_healthy
    startup_allowance_s: float = 0.0  # seconds of start-up, after which failure_reset_s begins
    wait_before_start: Callable[[int], Awaitable[None]] | None = None
    on_exit: Callable[[int, ChildProcess], Awaitable[None]] | None = None
    is_fatal_exit: Callable[[int, ChildProcess], bool] = is_unusable_exit  # whether this exit ends the run


class Supervisor:
    def __init__(
        self,
        programs: Mapping[str, Program],
        children: ChildProcesses,
        settings: SupervisionConfig,
        print_line: Callable[[str], None] | None = None,
    ) -> None:
        """`print_line` shows one line per restart."""
        self._print_line = print_line
        self._programs = programs
        self._children = children
        self._settings = settings
        self._failures = dict.fromkeys(programs, 0)
        self._last_reasons: dict[str, ExitReason | None] = {}
        self._watches: dict[str, HeartbeatWatch] = {}  # watches of the present incarnations
        self._tasks: list[asyncio.Task[None]] = []
        self._logger = structlog.get_logger()

    @property
    def names(self) -> Sequence[str]:
        return list(self._programs)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run_forever(name), name=name) for name in self._programs]

    async def wait_for_failure(self) -> NoReturn:
        """Raise ProcessDied when a process has failed too often, or with an error that a restart cannot fix."""
        failed, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in failed:
            task.result()
        raise AssertionError("a process is restarted until it has failed too often")

    async def stop(self) -> None:
        """Stop restarting. ChildProcesses stops the processes that run."""
        await cancel_tasks(*self._tasks)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        for watch in self._watches.values():
            watch.on_heartbeat(heartbeat)

    def mark_healthy(self, name: str) -> None:
        self._failures[name] = 0

    # ---------------------------------------------------------------- incarnations

    async def _run_forever(self, name: str) -> None:
        """Start incarnations one after the other. Raises ProcessDied."""
        program, loop = self._programs[name], asyncio.get_running_loop()
        for incarnation in count(1):
            if program.wait_before_start is not None:
                await program.wait_before_start(incarnation)
            senders = program.heartbeat_senders or (name,)
            watch = self._watches[name] = self._children.watch_heartbeats(senders, incarnation, self._settings)
            began = loop.time()
            environment = {**build_thread_environment(program.threads), **program.environment}
            child = await self._children.spawn(name, program.build_argv(incarnation), environment)
            hang = await watch.wait_for_exit(child.process)
            del self._watches[name]
            if hang is not None:
                await self._children.kill_hung(name, hang)
            worked_s = loop.time() - began - (hang.duration_s if hang is not None else 0.0)
            if program.resets_failures and worked_s >= program.startup_allowance_s + self._settings.failure_reset_s:
                self._failures[name] = 0
            self._failures[name] += 1
            await self._handle_exit(program, incarnation, child, hang)
            await asyncio.sleep(self._settings.backoff_s * 2 ** (self._failures[name] - 1))

    async def _handle_exit(self, program: Program, incarnation: int, child: ChildProcess, hang: Hang | None) -> None:
        exit_code, failures = child.process.returncode, self._failures[child.name]
        self._logger.error(
            "process.died", name=child.name, incarnation=incarnation, exit_code=exit_code, failures_in_a_row=failures
        )
        if program.is_fatal_exit(incarnation, child):
            raise build_process_died_error(child)
        if program.on_exit is not None:
            await program.on_exit(incarnation, child)
        reason, last_reason = load_exit_reason(child.exit_reason_path), self._last_reasons.get(child.name)
        self._last_reasons[child.name] = reason
        if failures > 1 and reason is not None and reason.kind == "exception" and reason == last_reason:
            raise build_process_died_error(child, "twice in a row in the same way, the last time ")
        if failures > self._settings.restarts:
            last = f"the last time ({hang.cause}) " if hang is not None else "the last time "
            raise build_process_died_error(child, f"{failures} times in a row, {last}")
        if self._print_line is not None:
            text = hang.cause if hang is not None else reason.text if reason is not None else ""
            cause = f" ({text})" if text else ""
            self._print_line(f"{describe_exit(child)}{cause}; it restarts as incarnation {incarnation + 1}")
