"""`python -m torch.distributed.run --nproc-per-node RANKS -m engine.learner --run-folder FOLDER`: the learner's process.

Without torchrun it is a single rank. Rank 0 speaks to the bus as "learner" and passes each piece of work on to the
others by broadcast. It consumes BatchReady and waits for nothing but its own worker thread, and for engines' memory
where they share its GPUs; it produces, once at the beginning and once for each batch, StepTrained and then
WeightsPublished. Shutdown or SIGTERM ends it at once: a step
that is under way is abandoned, the last checkpoint stands.

A later life (`--life`) begins with the steps that its journal has since that checkpoint. Then it says again what it had
said, but publishes the last weights alone: the earlier ones may lie where the present ones do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
import uvloop

from bus.codec import decode
from bus.heartbeat import beating
from bus.joining import Join, over_zeromq
from bus.last_words import end_with
from bus.messages import BatchReady, MemoryLent, Progress, Shutdown, StepTrained
from bus.structured_log import configure
from bus.transport import Bus
from configs.errors import UNUSABLE, UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.distributed import Ranks, from_leader, join_ranks, leave_ranks
from engine.journal import BatchJournal
from engine.learner_rank import LearnerRank, Trained
from engine.loans import RECIPE, EnginesMemory

LAUNCHER = "launcher"
WAITING_BATCHES = 2  # and one for each step that may be collected ahead; the bus holds back what comes on top of them


class Learner:
    """The leading rank's asyncio side. All training happens in one worker thread, so that the loop never waits for it
    and torch keeps a single pool of threads."""

    def __init__(
        self,
        bus: Bus,
        run: Run,
        rank: LearnerRank,
        ranks: Ranks,
        worker: ThreadPoolExecutor,
        journal: BatchJournal,
        life: int = 1,
    ) -> None:
        self._bus = bus
        self._memory = EnginesMemory(bus, life, is_lent=run.sglang.colocate)
        self._journal = journal
        self._newest = max(journal.steps(), default=-1)  # step of the last batch that it was given
        self._sft_steps = run.sft.steps
        self._rank = rank
        self._ranks = ranks
        self._worker = worker
        self._batches: asyncio.Queue[BatchReady] = asyncio.Queue(WAITING_BATCHES + run.rl.max_staleness)
        self._showing: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger()
        self._under_way: Future[Trained] | None = None
        self.stop = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether the worker is in the middle of something."""
        return self._under_way is not None and not self._under_way.done()

    async def run(self, resume_step: int | None) -> None:
        """Until Shutdown, or until `stop` is set. Raises what the worker raises."""
        working = asyncio.create_task(self._work(resume_step))
        tasks = (working, asyncio.create_task(self._listen()), asyncio.create_task(self.stop.wait()))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()
        self._logger.info("learner.stopped", abandoned=self.busy)

    async def _listen(self) -> None:
        while True:
            delivery = await self._bus.receive_delivery()
            match decode(delivery.frame).message:
                case Shutdown():
                    return
                case BatchReady(step=step) as batch if step > self._newest:
                    self._newest = step
                    await asyncio.to_thread(self._journal.write, step, delivery.frame)
                    self._bus.acknowledge(delivery)
                    await self._batches.put(batch)
                    continue
                case MemoryLent() as lent:
                    self._memory.hear(lent)
                case BatchReady():
                    pass  # an earlier life was given it, and could not say so
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)
            self._bus.acknowledge(delivery)

    async def _work(self, resume_step: int | None) -> None:
        loop = asyncio.get_running_loop()

        def report(step: int, values: dict[str, float]) -> None:
            loop.call_soon_threadsafe(self._show, Progress("sft", step, self._sft_steps, values))

        given = self._journal.steps()  # before it waits: what comes meanwhile is written there too
        await self._memory.take(-1)
        begun = await self._in_worker(lambda: self._rank.start(resume_step, report, given))
        await self._announce(begun)
        for step in given:
            if step > begun.step:
                batch = await asyncio.to_thread(self._journal.read, step)
                await self._step(batch, publish=step == given[-1])
        while True:
            batch = await self._batches.get()
            if batch.step > begun.step:  # else an earlier life has trained on it
                await self._step(batch, publish=True)

    async def _step(self, batch: BatchReady, *, publish: bool) -> None:
        await self._memory.take(batch.step)
        await self._announce(await self._in_worker(lambda: self._train(batch, publish)))

    def _train(self, batch: BatchReady, publish: bool) -> Trained:
        from_leader(self._ranks, (batch, publish))
        return self._rank.train(batch.step, batch.rows, publish=publish)

    async def _in_worker(self, work: Callable[[], Trained]) -> Trained:
        self._under_way = self._worker.submit(work)
        return await asyncio.wrap_future(self._under_way)

    async def _announce(self, trained: Trained) -> None:
        await self._bus.send(RECIPE, StepTrained(trained.step, trained.metrics))
        if trained.published is not None:
            self._memory.give_back()
            await self._bus.send(RECIPE, trained.published)

    def _show(self, progress: Progress) -> None:
        """For the display alone: while the last one is not sent yet, this one is not sent at all."""
        if self._showing is None or self._showing.done():
            self._showing = asyncio.create_task(self._bus.send(LAUNCHER, progress))


class Life(NamedTuple):
    """One start of the learner, as the launcher numbers it."""

    number: int
    session: int
    resume_step: int | None


async def lead(run: Run, folder: RunFolder, ranks: Ranks, life: Life, join: Join) -> None:
    loop = asyncio.get_running_loop()
    journal = BatchJournal(folder.batches)
    bus = join("learner", life.session)
    worker = ThreadPoolExecutor(1, "training", torch.set_num_threads, (run.learner.threads,))
    rank = LearnerRank(run, folder, ranks, journal)
    learner = Learner(bus, run, rank, ranks, worker, journal, life.number)
    loop.add_signal_handler(signal.SIGTERM, learner.stop.set)
    try:
        async with beating("learner", life.number, run.supervision.heartbeat_s, folder.sockets, lambda: bus):
            await learner.run(life.resume_step)
    finally:
        await bus.close()
        rank.close()
    if learner.busy:
        os._exit(0)  # the worker cannot be interrupted, and what it does no longer counts
    await loop.run_in_executor(worker, from_leader, ranks, None)
    worker.shutdown()


def follow(run: Run, folder: RunFolder, ranks: Ranks, resume_step: int | None) -> None:
    """All ranks but the first: the same work, in the order in which the leader begins it."""
    rank = LearnerRank(run, folder, ranks)
    rank.start(resume_step, lambda _step, _values: None)
    while (work := from_leader(ranks)) is not None:
        batch, publish = work
        rank.train(batch.step, batch.rows, publish=publish)


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.learner", description="Trains the policy of a run.")
    parser.add_argument("--run-folder", type=Path, required=True, help="the run's folder, with its config.toml")
    parser.add_argument("--resume-step", type=int, help="checkpoint to go on from; by default the newest")
    parser.add_argument("--life", type=int, default=1, help="counts the learner's starts in one launch of the run")
    parser.add_argument("--session", type=int, default=0, help="what its links go by")
    parser.add_argument("--scratch", default="", help="as of configs.run_folder.RunFolder")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the launcher, which says Shutdown
    folder = RunFolder(arguments.run_folder, arguments.scratch)
    try:
        train(folder, Life(arguments.life, arguments.session, arguments.resume_step))
    except UnusableInput as error:
        return end_with(folder, "learner", error)
    except OSError as error:
        structlog.get_logger().exception("process.failed")
        sys.stderr.write(f"{error}\n")
        return UNUSABLE
    return 0


def train(folder: RunFolder, life: Life) -> None:
    """Raises UnusableInput for what a user can mend."""
    run = load_resolved(folder.config)
    ranks = join_ranks()
    configure(folder, "learner" if ranks.leads else f"learner-{ranks.rank}", run.log.level)
    torch.set_num_threads(run.learner.threads)
    if run.determinism == "strict":
        torch.use_deterministic_algorithms(True)  # what has none is an error
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - slow
    if ranks.leads:
        uvloop.run(lead(run, folder, ranks, life, over_zeromq(run, folder)))
    else:
        follow(run, folder, ranks, life.resume_step)
    leave_ranks(ranks)


if __name__ == "__main__":
    sys.exit(main())
