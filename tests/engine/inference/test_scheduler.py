"""The scheduler without tensors, as a simulator uses it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from engine.contract import Capacity, Generation, GenerationRequest
from engine.inference.running_batch import RunningBatch
from engine.inference.scheduler import Scheduler


class FakeRows:
    """Implements engine.inference.running_batch.BatchRows; every generated token is 0."""

    def __init__(self) -> None:
        self._token_ids: dict[int, NDArray[np.int32]] = {}  # by row

    def assign(self, row: int, request: GenerationRequest, token_ids: NDArray[np.int32], *_: object) -> None:
        self._token_ids[row] = token_ids

    def append_page(self, *_: object) -> None:
        pass

    def activate(self, *_: object) -> None:
        pass

    def read_back(self, row: int, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        assigned = self._token_ids[row]
        token_ids = np.concatenate((assigned, np.zeros(end - len(assigned), np.int32)))
        return token_ids, np.zeros(end - first, np.float32)


def test_the_scheduler_runs_without_tensors_and_preempts_the_newest_request() -> None:
    batch = RunningBatch(FakeRows(), 2, 4, lambda join_ids, _: list(range(len(join_ids))))
    scheduler = Scheduler(Capacity(24, 4, 20), batch, 8, 0, lambda _: None)
    for number in range(2):
        scheduler.submit(GenerationRequest(number, np.full(6, number + 1, np.int32), 12))
    finished: list[int] = []
    while scheduler.has_work:
        scheduler.schedule_step()
        ends = [index for index, position in enumerate(batch.positions) if position + 1 == 6 + 12 - 1]
        for number, outcome in scheduler.on_tokens_generated(ends):
            assert isinstance(outcome, Generation)
            assert len(outcome.token_ids) == 12
            finished.append(number)
    assert finished == [0, 1]
    assert scheduler.get_load(0.0).preempted == 1


def test_the_scheduler_does_not_import_torch() -> None:
    program = "import sys, engine.inference.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
