"""Simulates asterism.engine.learner.learner without a model. The learner's disk survives restarts."""

import asyncio
from collections.abc import Callable
from random import Random

import msgspec

from asterism.bus import messages as msg
from asterism.bus.addresses import RECIPE
from asterism.bus.bus import Bus
from asterism.bus.codec import decode
from asterism.engine.learner.engine_gpu_memory import EngineGpuMemory
from asterism.policies.groups.staleness import check_versions
from tests.batches import BatchAssembler, CompleteBatch

TRAINING_S = 1.0


class Disk(msgspec.Struct):
    """The disk of the learner."""

    checkpoints: set[int] = set()
    journal: dict[int, bytes] = {}  # frames of batches, by step
    groups: BatchAssembler = msgspec.field(default_factory=BatchAssembler)  # files of accepted groups
    batches: list[CompleteBatch] = []  # all trained batches, ordered by first training

    def trained(self, batch: CompleteBatch) -> None:
        """Record a trained batch. A repeated step must have the same rows."""
        steps = {each.step: each for each in self.batches}
        if batch.step in steps:
            assert steps[batch.step] == batch, f"step {batch.step} is made again with other rows"
        else:
            self.batches.append(batch)

    def go_back_to(self, step: int) -> None:
        """Delete all data of later steps, as asterism.actors.launch.launcher does."""
        self.journal.clear()
        self.groups = BatchAssembler()
        self.checkpoints = {each for each in self.checkpoints if each <= step}
        self.batches = [batch for batch in self.batches if batch.step <= step]

    def rows(self) -> list[msg.TrainingSample]:
        return [row for batch in self.batches for row in batch.samples]


class SimulatedLearner:
    def __init__(
        self,
        bus: Bus,
        disk: Disk,
        random: Random,
        memory: EngineGpuMemory,
        *,
        steps: int,
        checkpoint_every: int,
        staleness: int,
        computing: Callable[[], None],
    ) -> None:
        """`computing` is called at the start and before the end of each computation."""
        self._memory, self._computing = memory, computing
        self._bus, self._disk, self._random = bus, disk, random
        self._steps, self._checkpoint_every, self._staleness = steps, checkpoint_every, staleness
        self._newest = max(disk.journal, default=-1)
        self._batches: asyncio.Queue[msg.BatchReady] = asyncio.Queue()
        self._step = 0
        self._committing: asyncio.Task[None] | None = None  # a checkpoint that is saved while training continues

    async def run(self, resume_step: int | None) -> None:
        """Train until Shutdown. Without `resume_step`, resume from the newest checkpoint."""
        working, listening = asyncio.create_task(self._work(resume_step)), asyncio.create_task(self._listen())
        try:
            done, _ = await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._committing is not None:  # Shutdown waits for the checkpoint
                await self._committing
        finally:
            for task in (working, listening, self._committing):
                if task is not None:
                    task.cancel()

    async def _moment(self) -> None:
        await asyncio.sleep(self._random.expovariate(20))

    async def _listen(self) -> None:
        while True:
            delivery = await self._bus.receive_delivery()
            match decode(delivery.frame).message:
                case msg.Shutdown():
                    return
                case msg.BatchReady(step=step) as batch if step > self._newest:
                    self._newest = step
                    await self._moment()
                    self._disk.journal[step] = delivery.frame
                    self._bus.acknowledge(delivery)
                    await self._batches.put(batch)
                    continue
                case msg.GroupAccepted() as group:
                    check_versions(group.samples, group.step, self._staleness)
                    await self._moment()
                    self._disk.groups.add(group)
                    self._bus.acknowledge(delivery)
                case msg.GpuMemoryGranted() as lent:
                    self._memory.on_granted(lent)
                    self._bus.acknowledge(delivery)
                case msg.BatchReady():
                    self._bus.acknowledge(delivery)
                case other:
                    raise AssertionError(f"the learner does not accept {type(other).__name__}")

    async def _work(self, resume_step: int | None) -> None:
        disk = self._disk
        given = sorted(disk.journal)
        await self._memory.acquire(-1)
        self._computing()
        begun = self._step = max(disk.checkpoints, default=0) if resume_step is None else resume_step
        if self._step not in disk.checkpoints:
            await self._save(self._step)
        await self._announce(self._step, {}, publish=not any(step > self._step for step in given))
        for step in given:
            if step > self._step:
                batch = decode(disk.journal[step]).message
                assert isinstance(batch, msg.BatchReady)
                await self._train(batch, publish=step == given[-1])
        while True:
            batch = await self._batches.get()
            if batch.step > begun:
                await self._train(batch, publish=True)

    async def _train(self, batch: msg.BatchReady, *, publish: bool) -> None:
        assert batch.step == self._step + 1, f"step {batch.step} cannot be trained after step {self._step}"
        await self._memory.acquire(batch.step)
        self._computing()
        (complete,) = self._disk.groups.add(batch)
        await asyncio.sleep(TRAINING_S)
        self._computing()
        self._disk.trained(complete)
        self._step = batch.step
        if batch.step == self._steps:
            await self._save(batch.step)
        await self._announce(batch.step, {"loss": 0.0}, publish=publish)
        if batch.step % self._checkpoint_every == 0 and batch.step < self._steps:
            await self._save(batch.step)

    async def _save(self, saved: int) -> None:
        if self._committing is not None:
            await self._committing
        self._committing = asyncio.create_task(self._commit(saved))
        if saved == self._steps:
            await self._committing

    async def _commit(self, saved: int) -> None:
        await asyncio.sleep(self._random.expovariate(1 / TRAINING_S))
        self._disk.checkpoints.add(saved)
        await self._moment()
        for step in [step for step in self._disk.journal if step <= saved]:
            del self._disk.journal[step]
        self._disk.groups.delete_up_to(saved)

    async def _announce(self, step: int, metrics: dict[str, float], *, publish: bool) -> None:
        await self._bus.send(RECIPE, msg.StepTrained(step, metrics))
        if publish:
            self._memory.release()
            await self._bus.send(RECIPE, msg.WeightsPublished(step, "/dev/shm/x", 4, "d"))
