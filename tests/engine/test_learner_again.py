"""A learner that is given a batch again which an earlier life of it has trained on: it says so, and goes on. One that
shares its GPUs with engines, which computes nothing before they have given their memory back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bus.in_process import Hub
from bus.messages import BatchReady, MemoryLent, MemoryWanted, StepTrained, WeightsPublished
from configs.schema import Engine, Run
from configs.sglang import Sglang
from engine.distributed import Ranks
from engine.journal import BatchJournal
from engine.learner import Learner
from engine.learner_rank import Trained


class ScriptedRank:
    """As much of engine.learner_rank.LearnerRank as is called; it goes on from the checkpoint of step 2."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def start(self, *_: object) -> Trained:
        return Trained(2, {}, WeightsPublished(2, "", 4, ""))

    def train(self, step: int, rows: object, *, publish: bool) -> Trained:
        self.trained.append(step)
        return Trained(step, {}, WeightsPublished(step, "", 4, "") if publish else None)


def test_a_batch_that_its_checkpoint_has_is_acknowledged_and_passed_over(tmp_path: Path) -> None:
    rank = ScriptedRank()

    async def scenario() -> None:
        hub = Hub()
        head, bus = hub.join("head", 100), hub.join("learner", 100)
        with ThreadPoolExecutor(1) as worker:
            learner = Learner(bus, Run(name="again"), rank, Ranks(), worker, BatchJournal(tmp_path))  # pyright: ignore
            running = asyncio.create_task(learner.run(None))
            for step in (1, 2, 3, 3):
                await head.send("learner", BatchReady(step, ()))
            heard = [(await head.receive()).message for _ in range(4)]
            while head.unacknowledged:  # noqa: ASYNC110 - what moves tells nobody
                await asyncio.sleep(0.001)
            learner.stop.set()
            await running
        assert [message.step for message in heard if isinstance(message, StepTrained)] == [2, 3]

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert rank.trained == [3]


def test_on_shared_gpus_it_asks_for_the_engines_memory_before_it_computes_and_gives_it_back_with_weights(
    tmp_path: Path,
) -> None:
    rank, run = ScriptedRank(), Run(name="shared", engine=Engine(kind="sglang"), sglang=Sglang(colocate=True))
    started: list[int] = []
    start = rank.start
    rank.start = lambda *_: started.append(1) or start()

    async def scenario() -> None:
        hub = Hub()
        head, bus = hub.join("head", 100), hub.join("learner", 100)
        with ThreadPoolExecutor(1) as worker:
            learner = Learner(bus, run, rank, Ranks(), worker, BatchJournal(tmp_path), life=2)  # pyright: ignore
            running = asyncio.create_task(learner.run(None))
            assert (await head.receive()).message == MemoryWanted(2, -1)
            await head.send("learner", MemoryLent(1, -1))  # an earlier life's
            await head.send("learner", BatchReady(3, ()))
            while head.unacknowledged:  # noqa: ASYNC110 - what moves tells nobody
                await asyncio.sleep(0.001)
            assert (started, head.waiting) == ([], 0)
            await head.send("learner", MemoryLent(2, -1))
            heard = [(await head.receive()).message for _ in range(3)]
            assert (started, rank.trained) == ([1], [])
            assert heard == [StepTrained(2, {}), WeightsPublished(2, "", 4, ""), MemoryWanted(2, 3)]
            await head.send("learner", MemoryLent(2, 3))
            assert (await head.receive()).message == StepTrained(3, {})
            learner.stop.set()
            await running

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert rank.trained == [3]
