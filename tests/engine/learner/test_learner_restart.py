"""Tests of restarted learners: they acknowledge old batches without training, and they can share GPUs with engines.

The batches are from the golden logs of bugs (tests.golden). The learner has no model.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asterism.actors.launch.launcher import roll_back_to
from asterism.bus import messages as msg
from asterism.bus.bus import Bus
from asterism.bus.codec import decode
from asterism.bus.event_log.records import Event
from asterism.bus.transport.in_process import Hub
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.batches.sample_files import StoredSequence
from asterism.engine.learner.batches.training_sequence import build_rl_sequence
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.learner import Learner
from asterism.engine.learner.learner_rank import TrainStepResult
from tests.batches import CompleteBatch, assemble_batches
from tests.golden.logs import read

pytestmark = [pytest.mark.real_clock, pytest.mark.timeout(30)]


Trained = list[tuple[int, list[tuple[int, list[int]]]]]  # steps, each with pairs of trajectory id and token ids


class ScriptedRank:
    """A LearnerRank (engine/learner/learner_rank.py) without a model. It resumes from the checkpoint of `step`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.started = False
        self.trained: Trained = []
        self.saved: list[int] = []

    def start(self, *_: object) -> TrainStepResult:
        self.started = True
        return TrainStepResult(self._step, {}, msg.WeightsPublished(self._step, "", 4, ""))

    def train(
        self, step: int, sequences: Sequence[StoredSequence], *, publish: bool, is_last: bool = False
    ) -> TrainStepResult:
        self.trained.append((step, [(each.trajectory_id, each.load().token_ids.tolist()) for each in sequences]))
        return TrainStepResult(step, {}, msg.WeightsPublished(step, "", 4, "") if publish else None)

    def save_if_due(self) -> None:
        self.saved.append(self.trained[-1][0])


@asynccontextmanager
async def running_learner(
    rank: ScriptedRank, run: RunConfig, journal: Path, incarnation: int = 1
) -> AsyncIterator[Bus]:
    """Run an incarnation of the learner, and yield the bus of the head."""
    hub = Hub()
    head, bus = hub.join("head", 100), hub.join("learner", 100)
    with ThreadPoolExecutor(1) as worker:
        learner = Learner(bus, run, rank, RankGroup(), worker, BatchJournal(journal), incarnation=incarnation)  # pyright: ignore
        running = asyncio.create_task(learner.run(None))
        yield head
        learner.stop.set()
        await running


async def train_on(
    rank: ScriptedRank, run: RunConfig, folder: RunFolder, given: Sequence[msg.GroupAccepted | msg.BatchReady]
) -> None:
    """Run the learner until it has trained on the last batch and acknowledged all messages."""
    async with running_learner(rank, run, folder.batches) as head:
        for message in given:
            await head.send("learner", message)
        while (await head.receive()).message != msg.StepTrained(given[-1].step, {}):
            pass
        await wait_for_acknowledgements(head)


async def wait_for_acknowledgements(head: Bus) -> None:
    while head.unacknowledged:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)


def read_batches(events: Sequence[Event]) -> list[list[msg.GroupAccepted | msg.BatchReady]]:
    """Return the messages of each batch: its groups, and then BatchReady."""
    batches: list[list[msg.GroupAccepted | msg.BatchReady]] = [[]]
    for message in (decode(event.frame).message for event in events):
        if isinstance(message, msg.GroupAccepted | msg.BatchReady):
            batches[-1].append(message)
        if isinstance(message, msg.BatchReady):
            batches.append([])
    return batches[:-1]


def list_trained(*batches: Sequence[msg.GroupAccepted | msg.BatchReady]) -> Trained:
    """Return the steps on which the learner trains, without tokens after the last loss token."""
    complete = [batch for messages in batches for batch in assemble_batches(messages)]
    return [(batch.step, list_tokens(batch)) for batch in complete]


def list_tokens(batch: CompleteBatch) -> list[tuple[int, list[int]]]:
    return [(each.trajectory_id, build_rl_sequence(each).token_ids.tolist()) for each in batch.samples]


async def test_an_old_batch_is_acknowledged_without_training(tmp_path: Path) -> None:
    """All processes were killed after the learner had trained on the first batch. The next head had no record of the
    acknowledgement, and sent the batch to the next learner, which had a checkpoint of that step."""
    found, events = read("batch_in_the_checkpoint")
    first, again, second = read_batches(events)
    assert first == again
    rank = ScriptedRank(first[-1].step)
    await train_on(rank, found.run, RunFolder(tmp_path), [*again, *second, *second])
    assert rank.trained == list_trained(second)
    assert rank.trained[0][1]


async def test_a_learner_does_not_train_on_a_batch_of_an_earlier_launch(tmp_path: Path) -> None:
    """All processes and the launcher were killed after the learner had received a batch, but before the checkpoint.
    The resumed run repeated the step with other trajectories."""
    found, events = read("batches_of_two_launches")
    earlier, *present = read_batches(events)
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    await train_on(ScriptedRank(0), found.run, folder, earlier)
    roll_back_to(folder, 0)
    rank = ScriptedRank(0)
    await train_on(rank, found.run, folder, [message for batch in present for message in batch])
    assert rank.trained == list_trained(*present)
    assert list_trained(earlier)[0][0] == rank.trained[0][0] and list_trained(earlier)[0] != rank.trained[0]


async def test_the_learner_requests_engine_memory_for_each_step(tmp_path: Path) -> None:
    run = RunConfig(name="shared", engine=EngineConfig(kind="sglang"), sglang=SGLangConfig(colocate=True))
    rank = ScriptedRank(2)
    async with running_learner(rank, run, tmp_path, incarnation=2) as head:
        assert (await head.receive()).message == msg.GpuMemoryRequested(2, -1)
        await head.send("learner", msg.GpuMemoryGranted(1, -1))  # a grant for an earlier incarnation
        await head.send("learner", msg.BatchReady(3, ()))
        await wait_for_acknowledgements(head)
        assert (rank.started, head.waiting) == (False, 0)
        await head.send("learner", msg.GpuMemoryGranted(2, -1))
        received = [(await head.receive()).message for _ in range(3)]
        assert (rank.started, rank.trained) == (True, [])
        assert received == [msg.StepTrained(2, {}), msg.WeightsPublished(2, "", 4, ""), msg.GpuMemoryRequested(2, 3)]
        await head.send("learner", msg.GpuMemoryGranted(2, 3))
        assert (await head.receive()).message == msg.StepTrained(3, {})
    assert rank.trained == [(3, [])]


async def test_shutdown_waits_for_a_save_that_the_busy_worker_has_not_begun(tmp_path: Path) -> None:
    """The other ranks have already begun the save."""
    hub, free = Hub(), threading.Event()
    head, bus = hub.join("head", 100), hub.join("learner", 100)
    with ThreadPoolExecutor(1) as worker:

        class BusyRank(ScriptedRank):
            def train(self, *given: Any, **options: Any) -> TrainStepResult:
                worker.submit(free.wait)
                return super().train(*given, **options)

        rank = BusyRank(0)
        learner = Learner(bus, RunConfig(name="r"), rank, RankGroup(), worker, BatchJournal(tmp_path))  # pyright: ignore
        running = asyncio.create_task(learner.run(None))
        await head.send("learner", msg.BatchReady(1, ()))
        while (await head.receive()).message != msg.WeightsPublished(1, "", 4, ""):
            pass
        await head.send("learner", msg.Shutdown())
        for _ in range(100):  # until the learner has received Shutdown
            await asyncio.sleep(0)
        assert (running.done(), rank.saved) == (False, [])
        free.set()
        await running
    assert rank.saved == [1]


async def test_a_starting_learner_receives_a_grant_behind_all_batches_of_a_run(tmp_path: Path) -> None:
    """Head and learner were killed. The head had no record of acknowledgements (seed 95 of a simulated run)."""
    run = RunConfig(name="shared", engine=EngineConfig(kind="sglang"), sglang=SGLangConfig(colocate=True))
    rank = ScriptedRank(6)
    async with running_learner(rank, run, tmp_path, incarnation=2) as head:
        assert (await head.receive()).message == msg.GpuMemoryRequested(2, -1)
        for step in range(1, 7):
            await head.send("learner", msg.BatchReady(step, ()))
        await wait_for_acknowledgements(head)
        await head.send("learner", msg.GpuMemoryGranted(2, -1))
        assert (await head.receive()).message == msg.StepTrained(6, {})
    assert rank.trained == []
