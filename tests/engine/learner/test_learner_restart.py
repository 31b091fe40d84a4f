"""A restarted learner acknowledges batches up to its checkpoint. A learner on shared GPUs waits for the engines' memory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bus.messages import BatchReady, GpuMemoryGranted, GpuMemoryRequested, StepTrained, WeightsPublished
from bus.transport.in_process import Hub
from configs.schema import EngineConfig, RunConfig
from configs.sglang_options import SGLangConfig
from engine.learner.batch_journal import BatchJournal
from engine.learner.distributed import RankGroup
from engine.learner.learner import Learner
from engine.learner.learner_rank import TrainStepResult


class ScriptedRank:
    """The methods of engine.learner.learner_rank.LearnerRank that are called; resumes from the checkpoint of step 2."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def start(self, *_: object) -> TrainStepResult:
        return TrainStepResult(2, {}, WeightsPublished(2, "", 4, ""))

    def train(self, step: int, rows: object, *, publish: bool) -> TrainStepResult:
        self.trained.append(step)
        return TrainStepResult(step, {}, WeightsPublished(step, "", 4, "") if publish else None)


def test_a_batch_up_to_the_checkpoint_is_acknowledged_and_skipped(tmp_path: Path) -> None:
    rank = ScriptedRank()

    async def scenario() -> None:
        hub = Hub()
        head, bus = hub.join("head", 100), hub.join("learner", 100)
        with ThreadPoolExecutor(1) as worker:
            learner = Learner(bus, RunConfig(name="again"), rank, RankGroup(), worker, BatchJournal(tmp_path))  # pyright: ignore
            running = asyncio.create_task(learner.run(None))
            for step in (1, 2, 3, 3):
                await head.send("learner", BatchReady(step, ()))
            heard = [(await head.receive()).message for _ in range(4)]
            while head.unacknowledged:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)
            learner.stop.set()
            await running
        assert [message.step for message in heard if isinstance(message, StepTrained)] == [2, 3]

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert rank.trained == [3]


def test_the_learner_borrows_engine_memory_for_each_step(
    tmp_path: Path,
) -> None:
    rank, run = (
        ScriptedRank(),
        RunConfig(name="shared", engine=EngineConfig(kind="sglang"), sglang=SGLangConfig(colocate=True)),
    )
    started: list[int] = []
    start = rank.start
    rank.start = lambda *_: started.append(1) or start()

    async def scenario() -> None:
        hub = Hub()
        head, bus = hub.join("head", 100), hub.join("learner", 100)
        with ThreadPoolExecutor(1) as worker:
            learner = Learner(bus, run, rank, RankGroup(), worker, BatchJournal(tmp_path), incarnation=2)  # pyright: ignore
            running = asyncio.create_task(learner.run(None))
            assert (await head.receive()).message == GpuMemoryRequested(2, -1)
            await head.send("learner", GpuMemoryGranted(1, -1))  # of an earlier incarnation
            await head.send("learner", BatchReady(3, ()))
            while head.unacknowledged:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.001)
            assert (started, head.waiting) == ([], 0)
            await head.send("learner", GpuMemoryGranted(2, -1))
            heard = [(await head.receive()).message for _ in range(3)]
            assert (started, rank.trained) == ([1], [])
            assert heard == [StepTrained(2, {}), WeightsPublished(2, "", 4, ""), GpuMemoryRequested(2, 3)]
            await head.send("learner", GpuMemoryGranted(2, 3))
            assert (await head.receive()).message == StepTrained(3, {})
            learner.stop.set()
            await running

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert rank.trained == [3]
