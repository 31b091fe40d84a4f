"""The launcher: starts a run's processes, watches them, shows how the run goes, and ends them in order.

Consumes heartbeats (bus.heartbeat), Progress, RunFinished, and what executors and rollouts say of executors' coming and going; waits for
either a finished run, a process that cannot be kept alive (actors.supervisor), or SIGINT. Whatever ends it, no process
stays: children die with it, even after `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from functools import partial
from typing import Literal

import structlog

from actors.children import Child, Children, ProcessDied, last_words, threads
from actors.display import Display
from actors.executors import Executors
from actors.head import MetricsFile, step_to_resume
from actors.stalls import Stalls
from actors.supervisor import Program, Supervisor, unusable
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT, executors, generators
from bus.heartbeat import listening
from bus.messages import (
    CallsMoved,
    EngineLeft,
    ExecutorJoined,
    ExecutorProved,
    LedgerReported,
    Progress,
    RunFinished,
    Shutdown,
)
from bus.transport import Bus, process_of
from bus.zeromq import zmq_bus
from configs.errors import UNUSABLE
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.journal import BatchJournal
from engine.snapshots import forget_after

Ending = Literal["finished", "interrupted"]

STOP_WITHIN_S = 2.0  # for all but the head, from Shutdown on; then they are killed
STOP_HEAD_WITHIN_S = 1.2
_LIVES = 1 << 20  # of one process in one launch


def session_of(boot: int, life: int = 0) -> int:
    """What a process's links go by: of two lives of a process, the later one has the higher session."""
    return boot * _LIVES + life


def go_back_to(folder: RunFolder, step: int) -> None:
    """What a former launch did after `step` is forgotten, before any process lives: its first life may end at once."""
    forget_after(folder.checkpoints, step)
    BatchJournal(folder.batches).clear()
    MetricsFile(folder.metrics).keep_up_to(step)


class Launcher:
    def __init__(self, run: Run, folder: RunFolder, display: Display, boot: int) -> None:
        """`boot` counts the launches in this folder."""
        self._run = run
        self._folder = folder
        self._display = display
        self._boot = boot
        self._children = Children(folder.logs)
        self._logger = structlog.get_logger()

    async def launch(self) -> Ending:
        """Raises ProcessDied."""
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted.set)
        bus = zmq_bus(LAUNCHER, self._folder.sockets, self._run.bus.queue_messages, session_of(self._boot))
        executing = Executors(executors(self._run), (ROLLOUT,), bus, self._process)
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

    # ---------------------------------------------------------------- starting

    async def _prepare(self, interrupted: asyncio.Event) -> None:
        """Let the tiny task make its data, tokenizer and model."""
        began = time.monotonic()
        self._display.say("making the tiny task: questions, cold-start dialogues, tokenizer, model")
        child = await self._children.spawn("prepare", self._program("engine.tiny.prepare"), threads(1))
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
        num_threads = self._run.engine.threads
        programs = {
            **executing.programs(),
            **{
                name: Program(partial(self._deciding, name, step), helpless=self._forgotten) for name in (HEAD, ROLLOUT)
            },
            **{
                name: Program(partial(self._process, name), num_threads, left=partial(self._engine_left, bus))
                for name in generators(self._run)
            },
            LEARNER: Program(partial(self._learner, step), self._run.learner.threads),
        }
        supervisor = Supervisor(programs, self._children, self._run.supervision)
        self._logger.info("run.started", step=step, seed=self._run.seed, boot=self._boot)
        supervisor.start()
        return supervisor

    def _deciding(self, name: str, step: int, life: int) -> list[str]:
        """In the session of the launch: whoever decides goes on where its last life was killed."""
        lives = ("--life", str(life), "--session", str(session_of(self._boot)))
        return self._program("actors.process", name, "--step", str(step), *lives)

    def _forgotten(self, life: int, child: Child) -> bool:
        """Without a log, what it had decided died with it."""
        return not self._run.log.events or unusable(life, child)

    def _process(self, name: str, life: int) -> list[str]:
        lives = ("--life", str(life), "--session", str(session_of(self._boot, life)))
        return self._program("actors.process", name, *lives)

    def _learner(self, step: int, life: int) -> list[str]:
        """Its first life goes on from the step of the launch, a later one from the newest checkpoint."""
        first = ("--resume-step", str(step)) if life == 1 else ()
        lives = ("--life", str(life), "--session", str(session_of(self._boot, life)))
        return self._program(
            *("torch.distributed.run", "--nproc-per-node", str(self._run.learner.ranks), "--standalone"),
            *("--no-python", sys.executable, "-m", "actors.death"),  # each rank dies with torchrun's agent
            *(sys.executable, "-m", "engine.learner", *first, *lives),
        )

    def _program(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", module, *arguments, "--run-folder", str(self._folder.path)]

    # ---------------------------------------------------------------- watching

    async def _engine_left(self, bus: Bus, life: int, child: Child) -> None:
        left = EngineLeft(child.name, f"{child.name} ended with exit code {child.process.returncode}", life)
        for told in (f"{HEAD}/arbiter", f"{HEAD}/recipe", ROLLOUT):
            await bus.send(told, left)

    async def _watch(
        self, bus: Bus, supervisor: Supervisor, executing: Executors, interrupted: asyncio.Event
    ) -> Ending:
        stalls = Stalls(self._folder, self._run.supervision.stall_s, self._display)
        watching = asyncio.ensure_future(stalls.watch())
        following = asyncio.ensure_future(self._follow(bus, supervisor, executing, stalls))
        giving_up = asyncio.ensure_future(supervisor.until_given_up())
        stopping = asyncio.ensure_future(interrupted.wait())
        ends = (following, giving_up, stopping)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return "interrupted"
            if following.done():
                following.result()
                return "finished"
            giving_up.result()
            raise AssertionError("the supervisor gives up by raising")
        finally:
            for task in (*ends, watching):
                task.cancel()

    async def _follow(self, bus: Bus, supervisor: Supervisor, executing: Executors, stalls: Stalls) -> None:
        while True:
            match (await bus.receive()).message:
                case Progress() as progress:
                    stalls.moved()
                    self._display.show(progress)
                case ExecutorJoined() as event:
                    await executing.joined(event)
                case ExecutorProved(executor=executor):
                    supervisor.proved(process_of(executor))
                case CallsMoved(executor=executor, sent=sent, waiting=waiting, lost=lost):
                    self._logger.info("calls.moved", executor=executor, sent=sent, waiting=waiting, lost=lost)
                case LedgerReported() as report:
                    fields = {name: getattr(report, name) for name in report.__struct_fields__}
                    self._logger.info("ledger.reported", **fields)
                case RunFinished(steps=steps):
                    self._logger.info("run.finished", step=steps)
                    return
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)

    # ---------------------------------------------------------------- ending

    async def _stop(self, bus: Bus) -> None:
        """All but the head at once; then the head, whose log is the run's memory."""
        began = time.monotonic()
        others = [name for name in self._children.names if name != HEAD]
        await asyncio.gather(*(self._end(bus, name, STOP_WITHIN_S) for name in others))
        if HEAD in self._children.names:
            await self._end(bus, HEAD, STOP_HEAD_WITHIN_S)
        self._logger.info("processes.stopped", stop_s=time.monotonic() - began)

    def _check_that_logs_are_whole(self) -> None:
        """What a process has told is in its log, also of one that was killed as it ended; unless it could not write it."""
        for child in self._children.ended_badly():
            if child.name in (HEAD, ROLLOUT) and child.process.returncode == UNUSABLE:
                raise ProcessDied(f"{child.name} ended with exit code {UNUSABLE}:\n{last_words(child)}")

    async def _end(self, bus: Bus, name: str, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):  # its queue may be full; then it is killed below
            await asyncio.wait_for(bus.send(name, Shutdown()), timeout=0.5)
        if not await self._children.wait(name, seconds):
            await self._children.kill(name)
