"""`python -m asterism.engine.learner --run-folder FOLDER`: the learner's process.

torchrun starts one process for each of several ranks. Rank 0 joins the bus as "learner" and broadcasts its work to the
other ranks. It stores GroupAccepted; it consumes BatchReady and produces StepTrained, then WeightsPublished: once at
the start and once per batch, before the checkpoint of the step. It waits only for its worker thread, and for the memory
of engines that share its GPUs. After CheckpointRequested it saves the last trained step, sends CheckpointSaved and
trains no further step. After Shutdown or SIGTERM it exits as soon as a checkpoint in progress has its final name; an
unfinished step is abandoned.

A later incarnation (`--incarnation`) first repeats the journal's steps after the checkpoint from which it resumes. It
sends their StepTrained again, but publishes only the last weights: older weights can share the slot of current weights.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import structlog
import torch
import uvloop

from asterism.bus.addresses import LAUNCHER, LEARNER, RECIPE, RECORDER, name_learner_rank
from asterism.bus.bus import Bus, BusFactory
from asterism.bus.codec import decode
from asterism.bus.messages import (
    BatchReady,
    CheckpointRequested,
    CheckpointSaved,
    GpuMemoryGranted,
    GroupAccepted,
    MetricsRecorded,
    Progress,
    Shutdown,
    StepTrained,
)
from asterism.bus.process.heartbeat import sending_heartbeats, sending_heartbeats_from_thread
from asterism.bus.process.operations import OperationRecord, operations_path
from asterism.bus.process.process_main import make_process_parser, run_process_main
from asterism.bus.process.structured_log import configure_logging
from asterism.bus.process.waiting import wait_for_first
from asterism.bus.transport.zeromq import make_zeromq_bus_factory
from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.batches.sample_files import list_sequences
from asterism.engine.learner.distributed import (
    CollectiveFailed,
    RankGroup,
    broadcast_object,
    join_ranks,
    leave_ranks,
    naming_failed_collectives,
    read_rank,
)
from asterism.engine.learner.engine_gpu_memory import EngineGpuMemory
from asterism.engine.learner.learner_rank import LearnerRank, TrainStepResult

Result = TypeVar("Result")
SAVE = "save"  # broadcast to the other ranks instead of a batch


class Learner:
    """The leading rank's event loop. One worker thread does all training, so that torch has one thread pool."""

    def __init__(
        self,
        bus: Bus,
        run: RunConfig,
        rank: LearnerRank,
        ranks: RankGroup,
        worker: ThreadPoolExecutor,
        journal: BatchJournal,
        incarnation: int = 1,
    ) -> None:
        self._bus = bus
        self._gpu_memory = EngineGpuMemory(bus, incarnation, is_shared=run.sglang.colocate)
        self._journal = journal
        self._last_received_step = max(journal.list_steps(), default=-1)
        self._rank = rank
        self._ranks = ranks
        self._worker = worker
        # Bounded by the run's steps, because a restarted head delivers all its batches again. A full queue would delay
        # GpuMemoryGranted, for which a starting learner waits.
        self._batches: asyncio.Queue[BatchReady | None] = asyncio.Queue()  # None: CheckpointRequested has arrived
        self._has_started = self._is_save_requested = False
        self._progress_send: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger()
        self._in_flight: Future[Any] | None = None
        self._completion: asyncio.Task[None] | None = None  # completion of the last trained step
        self.stop = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        """Return whether the worker is running a task."""
        return self._in_flight is not None and not self._in_flight.done()

    async def run(self, resume_step: int | None) -> None:
        """Run until Shutdown, and then until a trained step is published and saved, or until `stop` is set.

        Raises the worker's exceptions.
        """
        try:
            await wait_for_first(self._run_training(resume_step), self._receive_messages(), self.stop.wait())
            if self._completion is not None:
                await wait_for_first(self._completion, self.stop.wait())
        finally:
            if self._completion is not None:
                self._completion.cancel()
        self._logger.info("learner.stopped", abandoned=self.is_busy)

    async def _receive_messages(self) -> None:
        while True:
            delivery = await self._bus.receive_delivery()
            match decode(delivery.frame).message:
                case Shutdown():
                    return
                case BatchReady(step=step) as batch if step > self._last_received_step:
                    self._last_received_step = step
                    await asyncio.to_thread(self._journal.write, step, delivery.frame)
                    self._bus.acknowledge(delivery)
                    await self._batches.put(batch)
                    continue
                case GroupAccepted() as group:
                    await asyncio.to_thread(self._journal.write_group, group)
                case CheckpointRequested():
                    await self._request_save()
                case GpuMemoryGranted() as granted:
                    self._gpu_memory.on_granted(granted)
                case BatchReady():
                    pass  # a batch that an earlier incarnation has journaled but not acknowledged
                case other:
                    self._logger.error("message.misdirected", kind=type(other).__name__)
            self._bus.acknowledge(delivery)

    async def _run_training(self, resume_step: int | None) -> None:
        loop = asyncio.get_running_loop()

        def report(step: int, values: dict[str, float]) -> None:
            asyncio.run_coroutine_threadsafe(self._report_sft_step(step, values), loop).result()

        journaled_steps = self._journal.list_steps()  # read before any wait, because later batches join the journal
        await self._gpu_memory.acquire(-1)
        started = await self._run_in_worker(lambda: self._rank.start(resume_step, report, journaled_steps))
        await self._send_result(started)
        self._has_started = True
        for step in journaled_steps:
            if step > started.step:
                batch = await asyncio.to_thread(self._journal.read, step)
                await self._run_step(batch, publish=step == journaled_steps[-1])
        while True:
            with self._ranks.operation("wait for a batch", is_limited=False):
                batch = await self._batches.get()
            if self._is_save_requested or batch is None:
                await self._save_and_wait()
            elif batch.step > started.step:  # earlier incarnations have trained earlier steps
                await self._run_step(batch, publish=True)

    async def _request_save(self) -> None:
        """Request a save after the step in flight. Before the start, there is no step to save."""
        self._is_save_requested = True
        if not self._has_started:
            await self._bus.send(LAUNCHER, CheckpointSaved(-1))
        await self._batches.put(None)

    async def _save_and_wait(self) -> None:
        """Save the last step and wait for Shutdown: a further step would be lost."""
        step = await self._run_in_worker(self._broadcast_and_save)
        await self._bus.send(LAUNCHER, CheckpointSaved(step))
        await asyncio.Event().wait()

    def _broadcast_and_save(self) -> int:
        broadcast_object(self._ranks, SAVE)
        return self._rank.save_now()

    async def _run_step(self, batch: BatchReady, *, publish: bool) -> None:
        await self._gpu_memory.acquire(batch.step)
        trained = await self._run_in_worker(lambda: self._broadcast_and_train(batch, publish))
        self._completion = asyncio.create_task(self._complete_step(trained))
        await asyncio.shield(self._completion)

    async def _complete_step(self, trained: TrainStepResult) -> None:
        """Send the result and save. Shutdown does not interrupt this, because a save needs all ranks."""
        await self._send_result(trained)
        await self._run_in_worker(self._rank.save_if_due)

    def _broadcast_and_train(self, batch: BatchReady, publish: bool) -> TrainStepResult:
        indexes = self._journal.read_indexes(batch)
        broadcast_object(self._ranks, (batch.step, indexes, publish, batch.is_last))
        return self._rank.train(batch.step, list_sequences(indexes), publish=publish, is_last=batch.is_last)

    async def _run_in_worker(self, work: Callable[[], Result]) -> Result:
        future = self._in_flight = self._worker.submit(work)
        return await asyncio.wrap_future(future)

    async def _send_result(self, trained: TrainStepResult) -> None:
        await self._bus.send(RECIPE, StepTrained(trained.step, trained.metrics))
        if trained.published is not None:
            self._gpu_memory.release()
            await self._bus.send(RECIPE, trained.published)

    async def _report_sft_step(self, step: int, values: dict[str, float]) -> None:
        """Send metrics to the metrics file, and to the display unless the previous send is in flight."""
        if self._progress_send is None or self._progress_send.done():
            progress = Progress("sft", step, self._rank.num_sft_steps, values)
            self._progress_send = asyncio.create_task(self._bus.send(LAUNCHER, progress))
        await self._bus.send(RECORDER, MetricsRecorded("sft", step, "", values))


class LearnerIncarnation(NamedTuple):
    """One start of the learner. The launcher numbers the starts."""

    number: int
    epoch: int
    resume_step: int | None


async def run_leader(
    run: RunConfig, folder: RunFolder, ranks: RankGroup, incarnation: LearnerIncarnation, join: BusFactory
) -> None:
    loop = asyncio.get_running_loop()
    journal = BatchJournal(folder.batches, run.rl.max_staleness)
    bus = join(LEARNER, incarnation.epoch)
    worker = ThreadPoolExecutor(1, "training", torch.set_num_threads, (run.learner.threads,))
    rank = LearnerRank(run, folder, ranks, journal)
    learner = Learner(bus, run, rank, ranks, worker, journal, incarnation.number)
    loop.add_signal_handler(signal.SIGTERM, learner.stop.set)
    try:
        sender = name_learner_rank(ranks.rank, ranks.world_size)
        heartbeat_s = run.supervision.heartbeat_s
        async with sending_heartbeats(sender, incarnation.number, heartbeat_s, folder.sockets, lambda: bus):
            await learner.run(incarnation.resume_step)
            if not learner.stop.is_set():  # other ranks can have exited after SIGTERM
                await asyncio.to_thread(rank.finish_saving)
    finally:
        await bus.close()
        rank.close()
    if learner.is_busy:
        os._exit(0)  # the worker cannot be interrupted, and its result is not needed
    await loop.run_in_executor(worker, broadcast_object, ranks, None)
    worker.shutdown()


def run_follower(run: RunConfig, folder: RunFolder, ranks: RankGroup, resume_step: int | None) -> None:
    """Run the broadcast work of the leading rank on another rank."""
    rank = LearnerRank(run, folder, ranks)
    try:
        rank.start(resume_step, lambda _step, _values: None)
        train_broadcast_batches(rank, ranks)
    finally:
        rank.close()


def train_broadcast_batches(rank: LearnerRank, ranks: RankGroup) -> None:
    """Train on all batches of Learner until the leading rank broadcasts None."""
    while (work := broadcast_object(ranks)) is not None:
        if work == SAVE:
            rank.save_now()
            continue
        step, indexes, publish, is_last = work
        rank.train(step, list_sequences(indexes), publish=publish, is_last=is_last)
        rank.save_if_due()


def main() -> int:
    parser = make_process_parser("asterism.engine.learner", "Trains the policy of a run.")
    parser.add_argument("--resume-step", type=int, help="step of the checkpoint to resume from (default: the newest)")
    arguments = parser.parse_args()
    incarnation = LearnerIncarnation(arguments.incarnation, arguments.epoch, arguments.resume_step)

    def work(folder: RunFolder) -> None:
        run_process(folder, incarnation)

    try:
        return run_process_main(LEARNER, arguments, work, outages=(CollectiveFailed,))
    except OSError as error:
        structlog.get_logger().exception("process.failed")
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE


def run_process(folder: RunFolder, incarnation: LearnerIncarnation) -> None:
    """Run one rank. Raises UnusableInput for problems that a user can fix, CollectiveFailed if another rank fails."""
    run = load_run(folder.config)
    rank, num_ranks = read_rank()
    sender, heartbeat_s = name_learner_rank(rank, num_ranks), run.supervision.heartbeat_s
    path = operations_path(folder, sender)
    operations = OperationRecord(run.learner.collective_timeout_s, path, incarnation.number)
    with naming_failed_collectives(rank, operations):
        with sending_heartbeats_from_thread(sender, incarnation.number, heartbeat_s, folder.sockets):
            with operations.run("start of the process groups"):
                ranks = join_ranks(run.learner)._replace(operations=operations)
            _configure_process(run, folder, ranks)
            if not ranks.is_leader:
                run_follower(run, folder, ranks, incarnation.resume_step)
        if ranks.is_leader:  # the leading rank's event loop sends heartbeats
            uvloop.run(run_leader(run, folder, ranks, incarnation, make_zeromq_bus_factory(run, folder)))
    operations.close()
    leave_ranks(ranks)


def _configure_process(run: RunConfig, folder: RunFolder, ranks: RankGroup) -> None:
    configure_logging(folder, LEARNER if ranks.is_leader else f"{LEARNER}-{ranks.rank}", run.log.level)
    torch.set_num_threads(run.learner.threads)
    if run.determinism == "strict":
        torch.use_deterministic_algorithms(True)  # nondeterministic algorithms raise an error
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - slow
