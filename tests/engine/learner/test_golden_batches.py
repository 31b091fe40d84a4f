"""The golden logs (tests.golden) of bugs with the learner's batches, replayed through the learner, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.launch.launcher import roll_back_to
from bus.codec import decode
from bus.event_log.records import Event
from bus.messages import BatchReady, StepTrained, TrainingSample, WeightsPublished
from bus.transport.in_process import Hub
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.learner.batch_journal import BatchJournal
from engine.learner.distributed import RankGroup
from engine.learner.learner import Learner
from engine.learner.learner_rank import TrainStepResult
from tests.golden.logs import read

PATIENCE_S = 30.0


class RememberingRank:
    """The methods of engine.learner.learner_rank.LearnerRank that are called; resumes from the checkpoint of `step`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trained: list[tuple[int, Sequence[TrainingSample]]] = []

    def start(self, *_: object) -> TrainStepResult:
        return TrainStepResult(self._step, {}, WeightsPublished(self._step, "", 4, ""))

    def train(self, step: int, rows: Sequence[TrainingSample], *, publish: bool) -> TrainStepResult:
        self.trained.append((step, rows))
        return TrainStepResult(step, {}, WeightsPublished(step, "", 4, "") if publish else None)


def batches(events: Sequence[Event]) -> list[BatchReady]:
    messages = (decode(event.frame).message for event in events)
    return [message for message in messages if isinstance(message, BatchReady)]


def live(rank: RememberingRank, run: RunConfig, folder: RunFolder, given: Sequence[BatchReady]) -> Mapping[str, int]:
    """One incarnation of the learner, until it has trained on the last batch; returns the unacknowledged messages."""

    async def scenario() -> Mapping[str, int]:
        hub = Hub()
        head, bus = hub.join("head", 100), hub.join("learner", 100)
        with ThreadPoolExecutor(1) as worker:
            learner = Learner(bus, run, rank, RankGroup(), worker, BatchJournal(folder.batches))  # pyright: ignore
            running = asyncio.create_task(learner.run(None))
            for batch in given:
                await head.send("learner", batch)
            while (await head.receive()).message != StepTrained(given[-1].step, {}):
                pass
            learner.stop.set()
            await running
        return head.unacknowledged

    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_batch_up_to_the_checkpoint_is_acknowledged_and_not_trained_again(tmp_path: Path) -> None:
    """All processes were killed after the learner had trained on the first batch. The head's next incarnation had no record
    of the acknowledgement, and sent the batch to the learner's next incarnation, which had a checkpoint of that step."""
    found, events = read("batch_in_the_checkpoint")
    first, again, second = batches(events)
    assert first == again
    rank = RememberingRank(first.step)
    assert not live(rank, found.run, RunFolder(tmp_path), [again, second])
    assert rank.trained == [(second.step, second.samples)]


def test_a_batch_of_an_earlier_launch_is_not_trained(tmp_path: Path) -> None:
    """All processes, including the launcher, died after the learner had received a batch and before its checkpoint. The
    resumed run repeated that step with other trajectories."""
    found, events = read("batches_of_two_launches")
    earlier, *present = batches(events)
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    BatchJournal(folder.batches).write(earlier.step, events[0].frame)
    roll_back_to(folder, 0)
    rank = RememberingRank(0)
    live(rank, found.run, folder, present)
    assert rank.trained == [(batch.step, batch.samples) for batch in present]
    assert earlier.step == present[0].step and earlier.samples != present[0].samples
