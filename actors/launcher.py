"""The launcher: starts a run's processes, watches them, shows how the run goes, and ends them in order.

Consumes Progress, RunFinished, and what executors and rollouts say of executors' coming and going; waits for either a
finished run, a child's death, or SIGINT. An executor that dies is started again (actors.executors). Whatever ends it,
no process stays: children die with it, even after `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from typing import Literal

import structlog

from actors.children import Children, ProcessDied, death_of, last_words, threads
from actors.display import Display
from actors.executors import Executors
from actors.head import step_to_resume
from actors.wiring import HEAD, LAUNCHER, LEARNER, ROLLOUT, executors, generators
from bus.messages import (
    CallsMoved,
    ExecutorJoined,
    ExecutorProved,
    LedgerReported,
    Progress,
    RunFinished,
    Shutdown,
)
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.run_folder import RunFolder
from configs.schema import Run

Ending = Literal["finished", "interrupted"]

STOP_WITHIN_S = 2.0  # for all but the head, from Shutdown on; then they are killed
STOP_HEAD_WITHIN_S = 1.2


class Launcher:
    def __init__(self, run: Run, folder: RunFolder, display: Display) -> None:
        self._run = run
        self._folder = folder
        self._display = display
        self._children = Children(folder.logs)
        self._logger = structlog.get_logger()

    async def launch(self) -> Ending:
        """Raises ProcessDied."""
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted.set)
        bus = zmq_bus(LAUNCHER, self._folder.sockets, self._run.bus.queue_messages)
        names = executors(self._run)
        kept = Executors(names, (ROLLOUT,), bus, self._children, self._executor)
        ending: Ending = "interrupted"
        try:
            if self._run.tiny is not None and not self._folder.checkpoints.joinpath("init").exists():  # made last
                await self._prepare(interrupted)
            if not interrupted.is_set():
                await self._start(kept)
                ending = await self._watch(bus, kept, interrupted)
        finally:
            await kept.stop()
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

    async def _start(self, kept: Executors) -> None:
        step = step_to_resume(self._folder)
        if step is not None:
            self._display.say(f"going on after step {step}")
        step = step or 0
        kept.start()
        self._logger.info("run.started", step=step, seed=self._run.seed)
        # Fewest to wait for first: who needs another's messages finds them queued.
        for name in (HEAD, ROLLOUT, *generators(self._run)):
            argv = self._program("actors.process", name, "--step", str(step))
            num_threads = self._run.engine.threads if name.startswith("generator") else 1
            await self._children.spawn(name, argv, threads(num_threads))
        learner = self._program(
            *("torch.distributed.run", "--nproc-per-node", str(self._run.learner.ranks), "--standalone"),
            *("--no-python", sys.executable, "-m", "actors.death"),  # each rank dies with torchrun's agent
            *(sys.executable, "-m", "engine.learner", "--resume-step", str(step)),
        )
        await self._children.spawn(LEARNER, learner, threads(self._run.learner.threads))

    def _executor(self, name: str, life: int) -> list[str]:
        return self._program("actors.process", name, "--life", str(life))

    def _program(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", module, *arguments, "--run-folder", str(self._folder.path)]

    # ---------------------------------------------------------------- watching

    async def _watch(self, bus: Bus, kept: Executors, interrupted: asyncio.Event) -> Ending:
        following = asyncio.ensure_future(self._follow(bus, kept))
        giving_up = asyncio.ensure_future(kept.until_given_up())
        dying = asyncio.ensure_future(self._children.first_exit(besides=kept.names))
        stopping = asyncio.ensure_future(interrupted.wait())
        tasks = (following, giving_up, dying, stopping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return "interrupted"
            if following.done():
                following.result()
                return "finished"
            if giving_up.done():
                giving_up.result()
            child = dying.result()
            self._logger.error("process.died", name=child.name, exit_code=child.process.returncode)
            raise death_of(child)
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, bus: Bus, kept: Executors) -> None:
        while True:
            match (await bus.receive()).message:
                case Progress() as progress:
                    self._display.show(progress)
                case ExecutorJoined() as event:
                    await kept.joined(event)
                case ExecutorProved() as event:
                    kept.proved(event)
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
        """A deciding process that did not end by itself, or not well, may not have written its last events."""
        for child in self._children.ended_badly():
            if child.name in (HEAD, ROLLOUT):
                raise ProcessDied(f"{child.name} ended with exit code {child.process.returncode}:\n{last_words(child)}")

    async def _end(self, bus: Bus, name: str, seconds: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):  # its queue may be full; then it is killed below
            await asyncio.wait_for(bus.send(name, Shutdown()), timeout=0.5)
        if not await self._children.wait(name, seconds):
            await self._children.kill(name)
