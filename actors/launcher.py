"""The launcher: starts a run's processes, watches them, shows how the run goes, and ends them in order.

Consumes heartbeats (bus.heartbeat), Progress, RunFinished, and what executors and rollouts say of executors' coming and going; waits for
either a finished run, a process that cannot be kept alive (actors.supervisor), or SIGINT. Whatever ends it, no process
stays: children die with it, even after `kill -9`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import structlog
from msgspec.structs import replace

from actors.children import Child, Children, ProcessDied, ended_with, last_words, threads
from actors.cluster import Cluster, book_of, first_listeners
from actors.commands import Commands, Meeting, session_of
from actors.display import Display
from actors.executors import Executors
from actors.head import MetricsFile, step_to_resume
from actors.hosts import meeting_environment
from actors.refusal import Refusal
from actors.stalls import Stalls
from actors.supervisor import Program, Supervisor, unusable
from actors.wiring import (
    HEAD,
    LAUNCHER,
    LEARNER,
    ROLLOUT,
    WEIGHTS,
    executors,
    generators,
    stops_within_s,
    tell_engine_left,
)
from bus.book import network_of, write_book, write_network
from bus.heartbeat import listening
from bus.messages import (
    CallsMoved,
    ClusterMessage,
    EngineLeft,
    ExecutorJoined,
    ExecutorProved,
    LedgerReported,
    Listener,
    Progress,
    RunFinished,
)
from bus.transport import Bus, process_of
from bus.zeromq import zmq_bus
from configs.errors import UNUSABLE
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.journal import BatchJournal
from engine.snapshots import forget_after

Ending = Literal["finished", "interrupted"]

STOP_HEAD_WITHIN_S = 1.2
NODES_LONGER_S = 2.0  # than the slowest of their processes


def go_back_to(folder: RunFolder, step: int) -> None:
    """What a former launch did after `step` is forgotten, before any process lives: its first life may end at once."""
    forget_after(folder.checkpoints, step)
    BatchJournal(folder.batches).clear()
    MetricsFile(folder.metrics).keep_up_to(step)


class Launcher:
    def __init__(self, run: Run, folder: RunFolder, display: Display, boot: int, refusal: Refusal) -> None:
        """`boot` counts the launches in this folder. `refusal` is noted by its log."""
        self._refusal = refusal
        self._run = run
        self._folder = folder
        self._display = display
        self._boot = boot
        self._commands = Commands(run, folder, boot)
        self._children = Children(folder)
        self._cluster: Cluster | None = None
        self._meeting: Meeting | None = None  # of the learner's ranks
        self._logger = structlog.get_logger()

    async def launch(self) -> Ending:
        """Raises ProcessDied and DiskRefused."""
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted.set)
        known = self._open_to_others()
        network = network_of(self._folder.sockets)
        bus = zmq_bus(LAUNCHER, self._folder.sockets, self._run.bus.queue_messages, session_of(self._boot), network)
        executing = Executors(executors(self._run), (ROLLOUT,), bus, self._commands.process)
        if known:
            self._cluster = Cluster(
                self._run, self._folder, self._boot, bus, known, executing, self._end_learner, self._display
            )
        supervisor: Supervisor | None = None
        ending: Ending = "interrupted"
        try:
            if self._run.tiny is not None and not self._folder.checkpoints.joinpath("init").exists():  # made last
                await self._prepare(interrupted)
            if not interrupted.is_set():
                supervisor = self._start(bus, executing)
                with listening(self._folder.sockets, supervisor.heard):
                    ending = await self._watch(bus, supervisor, executing, interrupted)
        finally:
            if supervisor is not None:
                await supervisor.stop()
            await self._stop(bus)
            await bus.close()
        if ending == "finished":
            self._check_that_logs_are_whole()
        return ending

    def _open_to_others(self) -> Sequence[Listener]:
        """Where this node's processes listen, if the run can be joined. Raises UnusableInput."""
        cluster = self._run.cluster
        if not cluster.key:
            return ()
        processes = (HEAD, ROLLOUT, *generators(self._run), *executors(self._run), LEARNER)
        known = first_listeners(self._run, processes)
        write_book(self._folder.sockets, book_of(0, known, (), self._boot))
        write_network(self._folder.sockets, Path(cluster.key))
        self._display.say(f"others may join: asterism join tcp://{cluster.host}:{cluster.port} --key {cluster.key}")
        return known

    # ---------------------------------------------------------------- starting

    async def _prepare(self, interrupted: asyncio.Event) -> None:
        """Let the tiny task make its data, tokenizer and model."""
        began = time.monotonic()
        self._display.say("making the tiny task: questions, cold-start dialogues, tokenizer, model")
        child = await self._children.spawn("prepare", self._commands.prepare(), threads(1))
        exit_, stop = asyncio.ensure_future(child.process.wait()), asyncio.ensure_future(interrupted.wait())
        await asyncio.wait((exit_, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not exit_.done():
            exit_.cancel()
            return
        if child.process.returncode != 0:
            raise ProcessDied(f"preparing failed:\n{last_words(child)}")
        self._children.forget(child.name)
        self._logger.info("task.prepared", prepare_s=time.monotonic() - began)

    def _start(self, bus: Bus, executing: Executors) -> Supervisor:
        """Fewest to wait for first: who needs another's messages finds them queued."""
        step = step_to_resume(self._folder)
        if step is not None:
            self._display.say(f"going on after step {step}")
        step = step or 0
        go_back_to(self._folder, step)
        supervisor = Supervisor(self._programs(step, bus, executing), self._children, self._run.supervision)
        self._logger.info("run.started", step=step, seed=self._run.seed, boot=self._boot)
        supervisor.start()
        return supervisor

    def _programs(self, step: int, bus: Bus, executing: Executors) -> Mapping[str, Program]:
        run, commands = self._run, self._commands
        deciding = {
            name: Program(partial(commands.deciding, name, step), helpless=self._forgotten) for name in (HEAD, ROLLOUT)
        }
        engine_left = partial(self._engine_left, bus)
        generating = {
            name: Program(
                partial(commands.process, name),
                run.engine.threads,
                left=engine_left,
                starts_within_s=run.engine_starts_within_s,
            )
            for name in generators(run)
        }
        learner = Program(lambda life: commands.learner(step, life, self._meeting), run.learner.threads)
        if self._cluster is None:
            return {**executing.programs(), **deciding, **generating, LEARNER: learner}
        meeting = meeting_environment(run.cluster.host) if run.cluster.learner_nodes > 1 else {}
        learner = replace(learner, ready=partial(self._until_learner_may_begin, step), environment=meeting)
        weights = Program(commands.weights)
        return {**executing.programs(), WEIGHTS: weights, **deciding, **generating, LEARNER: learner}

    async def _until_learner_may_begin(self, step: int, life: int) -> None:
        assert self._cluster is not None
        self._meeting = await self._cluster.until_learner_may_begin(step, life)

    async def _end_learner(self) -> None:
        """Its next life begins with ranks on the nodes that are there."""
        if LEARNER in self._children.names:
            await self._children.kill(LEARNER)

    def _forgotten(self, life: int, child: Child) -> bool:
        """Without a log, what it had decided died with it."""
        return not self._run.log.events or unusable(life, child)

    # ---------------------------------------------------------------- watching

    async def _engine_left(self, bus: Bus, life: int, child: Child) -> None:
        await tell_engine_left(bus, EngineLeft(child.name, ended_with(child), life))

    async def _watch(
        self, bus: Bus, supervisor: Supervisor, executing: Executors, interrupted: asyncio.Event
    ) -> Ending:
        stalls = Stalls(self._folder, self._run.supervision.stall_s, self._display)
        watching = asyncio.ensure_future(stalls.watch())
        following = asyncio.ensure_future(self._follow(bus, supervisor, executing, stalls))
        giving_up = asyncio.ensure_future(supervisor.until_given_up())
        beating = () if self._cluster is None else (asyncio.ensure_future(self._cluster.watch()),)
        stopping = asyncio.ensure_future(interrupted.wait())
        refused = asyncio.ensure_future(self._refusal.wait())
        ends = (following, giving_up, stopping, refused, *beating)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return "interrupted"
            if following.done():
                following.result()
                return "finished"
            for end in ends:
                if end.done():
                    end.result()
            raise AssertionError("the others end by raising")
        finally:
            for task in (*ends, watching):
                task.cancel()

    async def _follow(self, bus: Bus, supervisor: Supervisor, executing: Executors, stalls: Stalls) -> None:
        while True:
            envelope = await bus.receive()
            match envelope.message:
                case Progress() as progress:
                    stalls.moved()
                    self._display.show(progress)
                case ExecutorJoined() as event:
                    await executing.joined(event)
                case ExecutorProved(executor=executor) if process_of(executor) in supervisor.names:
                    supervisor.proved(process_of(executor))
                case CallsMoved(executor=executor, sent=sent, waiting=waiting, lost=lost):
                    self._logger.info("calls.moved", executor=executor, sent=sent, waiting=waiting, lost=lost)
                case LedgerReported() as report:
                    fields = {name: getattr(report, name) for name in report.__struct_fields__}
                    self._logger.info("ledger.reported", **fields)
                case RunFinished(steps=steps):
                    self._logger.info("run.finished", step=steps)
                    return
                case message if self._cluster is not None and isinstance(message, ClusterMessage | ExecutorProved):
                    await self._cluster.take(envelope.sender, message)
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)

    # ---------------------------------------------------------------- ending

    async def _stop(self, bus: Bus) -> None:
        """All but the head at once; then the head, whose log is the run's memory."""
        began = time.monotonic()
        others = [name for name in self._children.names if name not in (HEAD, WEIGHTS)]
        ending = [self._children.end(bus, name, stops_within_s(self._run, name)) for name in others]
        if WEIGHTS in self._children.names:
            ending.append(self._children.terminate(WEIGHTS, stops_within_s(self._run, WEIGHTS)))
        if self._cluster is not None:
            slowest_s = max(stops_within_s(self._run, name) for name in generators(self._run))
            ending.append(self._cluster.end(slowest_s + NODES_LONGER_S))
        await asyncio.gather(*ending)
        if HEAD in self._children.names:
            await self._children.end(bus, HEAD, STOP_HEAD_WITHIN_S)
        self._logger.info("processes.stopped", stop_s=time.monotonic() - began)

    def _check_that_logs_are_whole(self) -> None:
        """What a process has told is in its log, also of one that was killed as it ended; unless it could not write it."""
        for child in self._children.ended_badly():
            if child.name in (HEAD, ROLLOUT) and child.process.returncode == UNUSABLE:
                raise ProcessDied(f"{child.name} ended with exit code {UNUSABLE}:\n{last_words(child)}")
