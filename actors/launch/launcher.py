"""The launcher starts a run's processes, supervises them, shows progress, and stops them in order.

Consumes heartbeats (asterism.bus.process.heartbeat), Progress, HealthReported, RunFinished, and messages about
executors; waits for the run's end, a process that fails too often (supervisor.py), or SIGINT. No process outlives the
launcher: children die with it, even after `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import structlog
from msgspec.structs import asdict, replace

from asterism.actors.evaluation.answer_log import drop_answers_after
from asterism.actors.launch.checks.data_digests import list_missing_files
from asterism.actors.launch.child_processes import (
    ChildProcess,
    ChildProcesses,
    ProcessDied,
    build_thread_environment,
    describe_exit,
)
from asterism.actors.launch.command_lines import CommandLines, Rendezvous, compute_link_epoch, list_heartbeat_senders
from asterism.actors.launch.display import Display
from asterism.actors.launch.executor_registry import ExecutorRegistry
from asterism.actors.launch.host_address import build_rendezvous_environment
from asterism.actors.launch.membership import ClusterMembership, assign_head_ports, build_address_book
from asterism.actors.launch.metric_sinks import MetricSinks, build_sink_argv
from asterism.actors.launch.stall_watchdog import StallWatchdog
from asterism.actors.launch.supervisor import Program, Supervisor, is_unusable_exit
from asterism.actors.metrics_file import MetricsFile, read_steps_written
from asterism.actors.runtime.resume_point import choose_resume_step
from asterism.actors.runtime.wiring import get_stop_timeout_s, list_executors, list_generators, send_engine_left
from asterism.bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT, WEIGHT_SERVER, parse_process
from asterism.bus.bus import Bus
from asterism.bus.messages import (
    CallsRescheduled,
    CheckpointRequested,
    CheckpointSaved,
    ClusterMessage,
    EarlyStopDecided,
    EngineLeft,
    ExecutorHealthy,
    ExecutorJoined,
    FailureReported,
    HealthReported,
    LedgerReported,
    Listener,
    Progress,
    RunFailed,
    RunFinished,
)
from asterism.bus.process.exit_reason import read_exit_reason
from asterism.bus.process.heartbeat import receiving_heartbeats
from asterism.bus.process.waiting import make_interrupt_event, wait_for_first
from asterism.bus.transport.address_book import load_network, write_address_book, write_key_location
from asterism.bus.transport.zeromq import open_zmq_bus
from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.checkpoints.checkpoint_folders import delete_checkpoints_after
from asterism.tasks.prepare_program import PREPARE

RunEnding = Literal["finished", "interrupted"]

HEAD_STOP_TIMEOUT_S = 1.2
_METRICS_POLL_S = 0.2
NODE_STOP_MARGIN_S = 2.0  # seconds after the timeout of a node's slowest process


class TrainingStopped(Exception):
    """A decider ended the run: a step or an evaluation has no trajectory with a result, or a health check has the
    action "stop". The text has the cause."""


def roll_back_to(folder: RunFolder, step: int) -> None:
    """Delete the results of earlier launches after `step`. No process may be running."""
    delete_checkpoints_after(folder.checkpoints, step)
    BatchJournal(folder.batches).clear()
    MetricsFile(folder.metrics).truncate_after(step)


class Launcher:
    def __init__(
        self, run: RunConfig, folder: RunFolder, display: Display, launch: int, log_failure: LogWriteFailure
    ) -> None:
        """`launch` counts the launches in this folder. `log_failure` records write errors of this process's log."""
        self._log_failure = log_failure
        self._run = run
        self._folder = folder
        self._display = display
        self._launch = launch
        self._command_lines = CommandLines(run, folder, launch)
        self._children = ChildProcesses(folder)
        self._sinks = MetricSinks(run, folder, display.print_line, partial(build_sink_argv, folder))
        self._cluster: ClusterMembership | None = None
        self._rendezvous: Rendezvous | None = None  # rendezvous of the learner's ranks, if they run on several nodes
        self._saved_steps: asyncio.Queue[int] = asyncio.Queue()  # steps of CheckpointSaved; at most one is requested
        self._logger = structlog.get_logger()

    async def launch(self) -> RunEnding:
        """Run all processes until the run ends. Raises ProcessDied and DiskError."""
        interrupted = make_interrupt_event()
        listeners = self._open_cluster()
        network = load_network(self._folder.sockets)
        bus = open_zmq_bus(
            LAUNCHER, self._folder.sockets, self._run.bus.queue_messages, compute_link_epoch(self._launch), network
        )
        executor_registry = ExecutorRegistry(
            list_executors(self._run), (ROLLOUT,), bus, self._command_lines.build_worker_argv
        )
        if listeners:
            self._cluster = ClusterMembership(
                *(self._run, self._folder, self._launch, bus, listeners, executor_registry),
                *(self._kill_learner, self._display),
            )
        supervisor: Supervisor | None = None
        ending: RunEnding = "interrupted"
        try:
            if list_missing_files(self._folder, self._run):
                await self._prepare(interrupted)
            if not interrupted.is_set():
                print_line = self._display.print_line
                step = await asyncio.to_thread(choose_resume_step, self._folder, self._run, print_line)
                supervisor = self._start(step, bus, executor_registry)
                with receiving_heartbeats(self._folder.sockets, supervisor.on_heartbeat):
                    ending = await self._wait_for_ending(bus, supervisor, executor_registry, interrupted)
        finally:
            if supervisor is not None:
                await supervisor.stop()
            await self._stop(bus)
            await bus.close()
        if ending == "finished":
            self._check_logs_complete()
        return ending

    def _open_cluster(self) -> Sequence[Listener]:
        """Assign the addresses of this node's processes if other nodes can join. Raises UnusableInput."""
        cluster = self._run.cluster
        if not cluster.key:
            return ()
        processes = (HEAD, ROLLOUT, *list_generators(self._run), *list_executors(self._run), LEARNER)
        listeners = assign_head_ports(self._run, processes)
        write_address_book(self._folder.sockets, build_address_book(0, listeners, (), self._launch))
        write_key_location(self._folder.sockets, Path(cluster.key))
        self._display.print_line(
            f"other nodes can join: asterism join tcp://{cluster.host}:{cluster.port} --key {cluster.key}"
        )
        return listeners

    # ---------------------------------------------------------------- starting

    async def _prepare(self, interrupted: asyncio.Event) -> None:
        """Run the program of [prepare]."""
        began = time.monotonic()
        self._display.print_line("preparing the run's files with the program of [prepare]")
        child = await self._children.spawn(
            PREPARE, self._command_lines.build_prepare_argv(), build_thread_environment(1)
        )
        await wait_for_first(child.process.wait(), interrupted.wait())
        if child.process.returncode is None:
            return
        if child.process.returncode != 0:
            raise ProcessDied(f"preparing failed:\n{read_exit_reason(child.output_path, child.exit_reason_path)}")
        self._children.remove(child.name)
        self._logger.info("task.prepared", prepare_s=time.monotonic() - began)

    def _start(self, step: int | None, bus: Bus, executor_registry: ExecutorRegistry) -> Supervisor:
        """Start in dependency order; messages to processes that are not up yet are queued.

        `step` is the step to resume from, or None without a checkpoint.
        """
        if step is not None:
            self._display.print_line(f"resuming after step {step}")
        step = step or 0
        roll_back_to(self._folder, step)
        if not self._run.evaluation.only:
            drop_answers_after(self._folder.answers, step)
        programs = self._build_programs(step, bus, executor_registry)
        supervisor = Supervisor(programs, self._children, self._run.supervision, self._display.print_line)
        self._logger.info("run.started", step=step, seed=self._run.seed, launch=self._launch)
        supervisor.start()
        self._sinks.start()
        return supervisor

    def _build_programs(self, step: int, bus: Bus, executor_registry: ExecutorRegistry) -> Mapping[str, Program]:
        run, commands = self._run, self._command_lines
        deciding = {
            name: Program(partial(commands.build_decider_argv, name, step), is_fatal_exit=self._is_fatal_decider_exit)
            for name in (HEAD, ROLLOUT)
        }
        generating = {
            name: Program(
                partial(commands.build_worker_argv, name),
                run.engine.threads,
                on_exit=partial(self._on_engine_exit, bus),
                startup_allowance_s=run.servers.startup_timeout_s,
            )
            for name in list_generators(run)
        }
        learner = Program(
            lambda incarnation: commands.build_learner_argv(step, incarnation, self._rendezvous),
            run.learner.threads,
            heartbeat_senders=list_heartbeat_senders(run.learner.ranks, 0, run.cluster.learner_nodes),
        )
        programs = {**executor_registry.build_programs(), **deciding, **generating, LEARNER: learner}
        if run.evaluation.only:
            del programs[LEARNER]
        if self._cluster is None or run.evaluation.only:
            return programs
        meeting = build_rendezvous_environment(run.cluster.host) if run.cluster.learner_nodes > 1 else {}
        learner = replace(learner, wait_before_start=partial(self._wait_for_learner_nodes, step), environment=meeting)
        return {WEIGHT_SERVER: Program(commands.build_weight_server_argv), **programs, LEARNER: learner}

    async def _wait_for_learner_nodes(self, step: int, incarnation: int) -> None:
        assert self._cluster is not None
        self._rendezvous = await self._cluster.wait_for_learner_nodes(step, incarnation)

    async def _kill_learner(self) -> None:
        """Kill the learner. Its next incarnation starts ranks on the nodes that are present then."""
        if LEARNER in self._children.names:
            await self._children.kill(LEARNER)

    def _is_fatal_decider_exit(self, incarnation: int, child: ChildProcess) -> bool:
        """Return whether the exit ends the run: without a log a decider cannot recover."""
        return not self._run.log.events or is_unusable_exit(incarnation, child)

    # ---------------------------------------------------------------- watching

    async def _on_engine_exit(self, bus: Bus, incarnation: int, child: ChildProcess) -> None:
        await send_engine_left(bus, EngineLeft(child.name, describe_exit(child), incarnation))

    async def _wait_for_ending(
        self, bus: Bus, supervisor: Supervisor, executor_registry: ExecutorRegistry, interrupted: asyncio.Event
    ) -> RunEnding:
        stall_watchdog = StallWatchdog(self._folder, self._run.supervision.stall_report_s, self._display)
        watching = asyncio.create_task(stall_watchdog.watch())
        try:
            return await wait_for_first(
                self._end_at_interrupt(bus, interrupted),
                self._receive_messages(bus, supervisor, executor_registry, stall_watchdog),
                supervisor.wait_for_failure(),
                self._log_failure.wait(),
                *(() if self._cluster is None else (self._cluster.monitor_heartbeats(),)),
            )
        finally:
            watching.cancel()

    async def _end_at_interrupt(self, bus: Bus, interrupted: asyncio.Event) -> RunEnding:
        """Wait for ^C or SIGTERM, then for a checkpoint: until it is saved, the grace period ends, or ^C comes again."""
        await interrupted.wait()
        grace_s = self._run.supervision.interrupt_grace_s
        if not grace_s or LEARNER not in self._children.names:
            return "interrupted"
        interrupted.clear()
        self._display.print_line(
            f"interrupted: the step in flight ends and is saved, within {grace_s:g} s; ^C again ends the run at once"
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                saving = save_at_interrupt(bus, self._saved_steps, self._folder.metrics)
                await wait_for_first(saving, wait_for_interrupt(interrupted))
        return "interrupted"

    async def _receive_messages(
        self, bus: Bus, supervisor: Supervisor, executor_registry: ExecutorRegistry, stall_watchdog: StallWatchdog
    ) -> RunEnding:
        while True:
            envelope = await bus.receive()
            match envelope.message:
                case Progress() as progress:
                    stall_watchdog.on_progress()
                    self._display.show_progress(progress)
                case HealthReported(step=step, message=message) as report:
                    self._logger.warning("health.reported", **asdict(report))
                    self._display.print_line(f"step {step}: {message}")
                case FailureReported() as report:
                    self._logger.warning("trajectory.failed_first", **asdict(report))
                    self._display.print_line(describe_failure(report, self._folder))
                case CheckpointSaved(step=step):
                    self._saved_steps.put_nowait(step)
                case ExecutorJoined() as event:
                    await executor_registry.on_joined(event)
                case ExecutorHealthy(executor=executor) if parse_process(executor) in supervisor.names:
                    supervisor.mark_healthy(parse_process(executor))
                case CallsRescheduled() as report:
                    self._logger.info("calls.rescheduled", **asdict(report))
                case LedgerReported() as report:
                    self._logger.info("ledger.reported", **asdict(report))
                case EarlyStopDecided(step=step, last_step=last_step, cause=cause) as decided:
                    self._logger.info("run.stops_early", **asdict(decided))
                    self._display.print_line(f"step {step}: {cause}; the run ends after step {last_step}")
                case RunFinished(steps=steps):
                    self._logger.info("run.finished", step=steps)
                    return "finished"
                case RunFailed(cause=cause):
                    self._logger.error("run.failed", cause=cause)
                    raise TrainingStopped(cause)
                case message if self._cluster is not None and isinstance(message, ClusterMessage | ExecutorHealthy):
                    await self._cluster.handle_message(envelope.sender, message)
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)

    # ---------------------------------------------------------------- ending

    async def _stop(self, bus: Bus) -> None:
        """Stop all other processes concurrently, then the head, so that its log is complete, and then the sinks."""
        began = time.monotonic()
        others = [name for name in self._children.names if name not in (HEAD, WEIGHT_SERVER)]
        ending = [self._children.shut_down(bus, name, get_stop_timeout_s(self._run, name)) for name in others]
        if WEIGHT_SERVER in self._children.names:
            ending.append(self._children.terminate(WEIGHT_SERVER, get_stop_timeout_s(self._run, WEIGHT_SERVER)))
        if self._cluster is not None:
            slowest_s = max(get_stop_timeout_s(self._run, name) for name in list_generators(self._run))
            ending.append(self._cluster.shut_down(slowest_s + NODE_STOP_MARGIN_S))
        await asyncio.gather(*ending)
        if HEAD in self._children.names:
            await self._children.shut_down(bus, HEAD, HEAD_STOP_TIMEOUT_S)
        self._logger.info("processes.stopped", stop_s=time.monotonic() - began)
        await self._sinks.finish()

    def _check_logs_complete(self) -> None:
        """Raise ProcessDied if a decider could not write its log. A kill at the end loses no logged effect."""
        for child in self._children.list_failed():
            if child.name in (HEAD, ROLLOUT) and child.process.returncode == EXIT_UNUSABLE:
                reason = read_exit_reason(child.output_path, child.exit_reason_path)
                raise ProcessDied(f"{child.name} ended with exit code {EXIT_UNUSABLE}:\n{reason}")


def describe_failure(report: FailureReported, folder: RunFolder) -> str:
    """Describe the first failed trajectory of a kind: its cause, and the command and the file with details."""
    where = f"step {report.step}" if report.step else "evaluation"
    cause = report.cause.partition("\n")[0]
    return (
        f"{where}: trajectory {report.trajectory_id} ({report.problem}) failed, the first one of its kind: {cause} "
        f"(more: asterism log story {folder.path} {report.trajectory_id}; tracebacks: {folder.logs}/executor-*.out)"
    )


async def save_at_interrupt(bus: Bus, saved_steps: asyncio.Queue[int], metrics: Path) -> Literal["interrupted"]:
    """Save, and wait for the step's metrics, which a resume needs. Their line follows the weights to the engines."""
    await bus.send(LEARNER, CheckpointRequested())
    step = await saved_steps.get()
    while True:
        written = await asyncio.to_thread(read_steps_written, metrics)
        if step <= 0 or step in written:
            break
        await asyncio.sleep(_METRICS_POLL_S)
    structlog.get_logger().info("checkpoint.saved_at_interrupt", step=step)
    return "interrupted"


async def wait_for_interrupt(interrupted: asyncio.Event) -> Literal["interrupted"]:
    await interrupted.wait()
    return "interrupted"


class LogWriteFailure:
    def __init__(self) -> None:
        self._first_error: DiskError | None = None
        self._recorded = asyncio.Event()

    def record(self, error: DiskError) -> None:
        """Record the first error. Called on the event loop's thread."""
        self._first_error = self._first_error or error
        self._recorded.set()

    async def wait(self) -> NoReturn:
        """Raise DiskError after the first write error."""
        await self._recorded.wait()
        assert self._first_error is not None
        raise self._first_error
