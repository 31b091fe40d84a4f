"""The golden logs (tests.golden) of bugs about what a learner is given, read again by the learner, over no model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.launcher import go_back_to
from bus.codec import decode
from bus.event_log import Event
from bus.in_process import Hub
from bus.messages import BatchReady, Row, StepTrained, WeightsPublished
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.distributed import Ranks
from engine.journal import BatchJournal
from engine.learner import Learner
from engine.learner_rank import Trained
from tests.golden.logs import read

PATIENCE_S = 30.0


class RememberingRank:
    """As much of engine.learner_rank.LearnerRank as is called; it goes on from the checkpoint of `step`."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trained: list[tuple[int, Sequence[Row]]] = []

    def start(self, *_: object) -> Trained:
        return Trained(self._step, {}, WeightsPublished(self._step, "", 4, ""))

    def train(self, step: int, rows: Sequence[Row], *, publish: bool) -> Trained:
        self.trained.append((step, rows))
        return Trained(step, {}, WeightsPublished(step, "", 4, "") if publish else None)


def batches(events: Sequence[Event]) -> list[BatchReady]:
    messages = (decode(event.frame).message for event in events)
    return [message for message in messages if isinstance(message, BatchReady)]


def live(rank: RememberingRank, run: Run, folder: RunFolder, given: Sequence[BatchReady]) -> Mapping[str, int]:
    """One life of the learner, until it has trained on the last of `given`: what it has then not acknowledged."""

    async def scenario() -> Mapping[str, int]:
        hub = Hub()
        head, bus = hub.join("head", 100), hub.join("learner", 100)
        with ThreadPoolExecutor(1) as worker:
            learner = Learner(bus, run, rank, Ranks(), worker, BatchJournal(folder.batches))  # pyright: ignore
            running = asyncio.create_task(learner.run(None))
            for batch in given:
                await head.send("learner", batch)
            while (await head.receive()).message != StepTrained(given[-1].step, {}):
                pass
            learner.stop.set()
            await running
        return head.unacknowledged

    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_batch_that_the_checkpoint_has_is_acknowledged_and_not_trained_on_again(tmp_path: Path) -> None:
    """The learner had trained on the first batch when everybody was killed at once. The head's next life did not know that it
    had been acknowledged, and gave it to the learner's next life, which had a checkpoint of that step."""
    found, events = read("a_batch_that_the_checkpoint_has")
    first, again, second = batches(events)
    assert first == again
    rank = RememberingRank(first.step)
    assert not live(rank, found.run, RunFolder(tmp_path), [again, second])
    assert rank.trained == [(second.step, second.rows)]


def test_nobody_trains_on_a_batch_of_an_earlier_launch(tmp_path: Path) -> None:
    """All died, with the launcher, after the learner had got a batch and before a checkpoint had it. The resumed run made
    that step again, with other trajectories."""
    found, events = read("batches_of_two_launches")
    earlier, *present = batches(events)
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    BatchJournal(folder.batches).write(earlier.step, events[0].frame)
    go_back_to(folder, 0)
    rank = RememberingRank(0)
    live(rank, found.run, folder, present)
    assert rank.trained == [(batch.step, batch.rows) for batch in present]
    assert earlier.step == present[0].step and earlier.rows != present[0].rows
