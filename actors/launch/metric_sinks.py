"""Each metric sink has a process outside the supervision of the run: the process is restarted while the run lasts, and
never ends the run.

At the end each sink gets a bounded time to deliver the rest. Nothing is lost afterwards: metrics.jsonl has all records, and
`asterism metrics sync` delivers them.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Sequence
from itertools import count
from signal import SIGTERM

import structlog

from asterism.actors.launch.child_processes import ChildProcess, ChildProcesses, build_thread_environment, describe_exit
from asterism.actors.sinks.delivery import count_undelivered, make_identity
from asterism.actors.sinks.sink_process import name_sink_process
from asterism.bus.process.exit_reason import load_exit_reason
from asterism.bus.process.waiting import wait_for_first
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

FIRST_PAUSE_S = 1.0  # seconds before a sink is restarted; doubled for each further failure in the run
LONGEST_PAUSE_S = 60.0
QUIET_S = 3.0  # seconds at the end of a run before a line names the sinks that are late

BuildArgv = Callable[[str, bool], Sequence[str]]


def build_sink_argv(folder: RunFolder, name: str, follow: bool) -> list[str]:
    """Build the command line. With `follow` the sink waits for further records until SIGTERM."""
    module = [sys.executable, "-P", "-m", "asterism.actors.sinks.sink_process", name, "--run-folder", str(folder.path)]
    return [*module, "--follow"] if follow else module


class MetricSinks:
    def __init__(
        self,
        run: RunConfig,
        folder: RunFolder,
        print_line: Callable[[str], None],
        build_argv: BuildArgv,
    ) -> None:
        self._options = run.metrics
        self._folder = folder
        self._print_line = print_line
        self._build_argv = build_argv
        self._children = ChildProcesses(folder)
        self._has_ended = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._causes: dict[str, str] = {}  # cause of the last death, by sink
        self._logger = structlog.get_logger()

    def start(self) -> None:
        """Start the sinks. metrics.jsonl must no longer have the steps that this launch repeats."""
        if self._options.sinks:
            make_identity(self._folder)
        self._tasks = {name: asyncio.create_task(self._keep_running(name)) for name in self._options.sinks}

    async def finish(self) -> None:
        """Deliver the rest of a complete metrics.jsonl within `metrics.flush_s`, and report undelivered records."""
        self._has_ended.set()
        if not self._tasks:
            return
        flush_s = self._options.flush_s
        _, late = await asyncio.wait(self._tasks.values(), timeout=min(flush_s, QUIET_S))
        if late and flush_s > QUIET_S:
            names = ", ".join(name for name, task in self._tasks.items() if task in late)
            self._print_line(f"metrics: waiting up to {flush_s:g} s for {names} (metrics.flush_s)")
            _, late = await asyncio.wait(late, timeout=flush_s - QUIET_S)
        for name, task in self._tasks.items():
            if task in late:
                task.cancel()
                self._causes.setdefault(name, f"not finished {flush_s:g} s after the run")
        results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for name, result in zip(self._tasks, results, strict=True):
            if isinstance(result, Exception):  # the process could not be started
                self._causes[name] = str(result)
        for child in self._children.list_running():
            await self._children.kill(child.name)
        await asyncio.to_thread(self._report)

    async def _keep_running(self, name: str) -> None:
        """Restart the sink until all records are delivered. The pause grows with each failure and is never reset."""
        for failures in count():
            follow = not self._has_ended.is_set()
            argv = self._build_argv(name, follow)
            child = await self._children.spawn(name_sink_process(name), argv, build_thread_environment(1))
            await wait_for_first(child.process.wait(), self._has_ended.wait())
            if follow and child.process.returncode is None:
                child.process.terminate()
            if await child.process.wait() == 0:
                return
            if not (follow and child.process.returncode == -SIGTERM):  # the signal preceded its handler
                self._record_death(name, child)
                await self._pause(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures))

    def _record_death(self, name: str, child: ChildProcess) -> None:
        reason = load_exit_reason(child.exit_reason_path)
        cause = reason.text if reason is not None else describe_exit(child)
        if name not in self._causes:
            self._print_line(f"metrics: {name} has an error, the run continues: {cause} ({child.output_path})")
        self._causes[name] = cause
        self._logger.warning("sink.died", sink=name, exit_code=child.process.returncode, cause=cause)

    async def _pause(self, pause_s: float) -> None:
        """Pause. If the run ends during the pause, the pause ends too."""
        if self._has_ended.is_set():
            await asyncio.sleep(pause_s)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_ended.wait(), pause_s)

    def _report(self) -> None:
        """Report undelivered records. An unusable ledger does not fail the run."""
        for name in self._tasks:
            try:
                undelivered, total = count_undelivered(self._folder, name)
            except (UnusableInput, OSError) as error:
                self._print_line(f"metrics: {name}: {error}")
                continue
            self._logger.info("sink.finished", sink=name, records=total, undelivered=undelivered)
            if undelivered:
                cause = self._causes.get(name, "its process has ended without an error")
                self._print_line(
                    f"metrics: {name} has not received {undelivered} of {total} records ({cause}); "
                    f"`asterism metrics sync {self._folder.path} --sink {name}` delivers them"
                )
