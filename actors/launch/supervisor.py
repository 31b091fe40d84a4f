"""Keeps processes alive: starts each one, and restarts it after it dies or is killed for missing heartbeats.

Each start is an incarnation. Before a restart the supervisor pauses, twice as long after each consecutive failure; after
too many of them, or two with the same exception, the run ends. `Program.on_exit` notifies other processes before the next incarnation starts.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from typing import NoReturn

import msgspec
import structlog

from actors.launch.child_processes import (
    ChildProcess,
    ChildProcesses,
    build_process_died_error,
    build_thread_environment,
    describe_exit,
)
from bus.process.exit_reason import ExitReason, load_exit_reason
from bus.process.heartbeat import Heartbeat
from bus.process.waiting import SuspensionGuard
from configs.errors import EXIT_UNUSABLE
from configs.machines import SupervisionConfig


def is_unusable_exit(incarnation: int, child: ChildProcess) -> bool:
    """The process cannot use its input (a file, a setting, the disk), so a restart would fail in the same way.

    The exit code of several learner ranks is torchrun's, whatever their exit codes are.
    """
    reason = load_exit_reason(child.exit_reason_path)
    return child.process.returncode == EXIT_UNUSABLE or (reason is not None and reason.kind == "unusable_input")


class Program(msgspec.Struct, frozen=True):
    """How a process is started and restarted."""

    build_argv: Callable[[int], Sequence[str]]  # from the incarnation's number
    threads: int = 1
    environment: Mapping[str, str] = {}
    resets_failures: bool = True  # after supervision.failure_reset_s; False: only by mark_healthy
    startup_allowance_s: float = 0.0  # start-up time, after which failure_reset_s begins
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
        self._incarnations: dict[str, int] = {}
        self._failures = dict.fromkeys(programs, 0)
        self._last_reasons: dict[str, ExitReason | None] = {}
        self._last_heartbeats: dict[str, float] = {}  # time, from the present incarnation
        self._tasks: list[asyncio.Task[None]] = []
        self._logger = structlog.get_logger()

    @property
    def names(self) -> Sequence[str]:
        return list(self._programs)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run_forever(name), name=name) for name in self._programs]

    async def wait_for_failure(self) -> NoReturn:
        """Raises ProcessDied when a process has failed too often, or with an error that a restart cannot fix."""
        failed, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in failed:
            task.result()
        raise AssertionError("a process is restarted until it has failed too often")

    async def stop(self) -> None:
        """Stop restarting. ChildProcesses stops the processes that run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if self._incarnations.get(heartbeat.process) == heartbeat.incarnation:
            self._last_heartbeats[heartbeat.process] = asyncio.get_running_loop().time()

    def mark_healthy(self, name: str) -> None:
        """Reset the failures of a process that has worked."""
        self._failures[name] = 0

    # ---------------------------------------------------------------- incarnations

    async def _run_forever(self, name: str) -> None:
        """Start incarnations one after the other. Raises ProcessDied."""
        program, loop = self._programs[name], asyncio.get_running_loop()
        for incarnation in count(1):
            if program.wait_before_start is not None:
                await program.wait_before_start(incarnation)
            self._incarnations[name] = incarnation
            self._last_heartbeats.pop(name, None)
            began = loop.time()
            environment = {**build_thread_environment(program.threads), **program.environment}
            child = await self._children.spawn(name, program.build_argv(incarnation), environment)
            await self._wait_for_exit(child, began)
            del self._incarnations[name]
            if (
                program.resets_failures
                and loop.time() - began >= program.startup_allowance_s + self._settings.failure_reset_s
            ):
                self._failures[name] = 0
            self._failures[name] += 1
            await self._handle_exit(program, incarnation, child)
            await asyncio.sleep(self._settings.backoff_s * 2 ** (self._failures[name] - 1))

    async def _wait_for_exit(self, child: ChildProcess, began: float) -> None:
        """Return when the process exits, or kill it when its heartbeats time out."""
        loop, settings = asyncio.get_running_loop(), self._settings
        guard = SuspensionGuard(settings.heartbeat_s)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.heartbeat_s):  # wait_for may lose a cancellation
                    await child.process.wait()
                return
            now, last = loop.time(), self._last_heartbeats.get(child.name)
            if guard.check():
                began = now
                if last is not None:
                    last = self._last_heartbeats[child.name] = now
            silent_s = now - (began if last is None else last)
            if silent_s > (settings.first_heartbeat_timeout_s if last is None else settings.heartbeat_timeout_s):
                self._logger.error("process.timed_out", name=child.name, silent_s=round(silent_s, 1))
                await self._children.kill(child.name)
                return

    async def _handle_exit(self, program: Program, incarnation: int, child: ChildProcess) -> None:
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
            raise build_process_died_error(child, f"{failures} times in a row, the last time ")
        if self._print_line is not None:
            cause = f" ({reason.text})" if reason else ""
            self._print_line(f"{describe_exit(child)}{cause}; it restarts as incarnation {incarnation + 1}")
