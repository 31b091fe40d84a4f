"""What a launch finds of the one before: nothing that came after the step at which it goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from actors.head import MetricsFile, NotResumable, find_cursor, newest_whole, steps_written
from actors.launcher import go_back_to
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import BufferCursor, Envelope, MetricsRecorded, StepCollected, StepCounts
from configs.run_folder import RunFolder
from engine.journal import BatchJournal


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Three steps were done, and the batches of two were not yet in a checkpoint."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    journal = BatchJournal(folder.batches)
    for step in (2, 3):
        journal.write(step, b"batch")
    write(folder, *(MetricsRecorded("step", step, "", {"loss": 1.0}) for step in (1, 2, 3)))
    return folder


def write(folder: RunFolder, *lines: MetricsRecorded) -> None:
    metrics = MetricsFile(folder.metrics)

    async def tell() -> None:
        for line in lines:
            await metrics.write(line)

    asyncio.run(tell())


def losses(folder: RunFolder) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def test_batches_of_a_former_launch_are_given_to_no_learner(folder: RunFolder) -> None:
    go_back_to(folder, 1)
    assert BatchJournal(folder.batches).steps() == []


@pytest.mark.parametrize(("step", "kept"), [(0, []), (1, [(1, 1.0)])])
def test_steps_that_are_done_again_get_a_line_again(
    folder: RunFolder, step: int, kept: list[tuple[int, float]]
) -> None:
    go_back_to(folder, step)
    assert losses(folder) == kept
    write(folder, *(MetricsRecorded("step", each, "", {"loss": 0.5}) for each in range(step + 1, 4)))
    assert losses(folder) == [*kept, *((each, 0.5) for each in range(step + 1, 4))]


def test_a_step_without_its_line_is_done_again(folder: RunFolder) -> None:
    assert steps_written(folder.metrics) == {1, 2, 3}
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":4')  # a kill came in the middle of it
    assert steps_written(folder.metrics) == {1, 2, 3}
    assert newest_whole({0, 2, 4}, {1, 2, 3}) == 2
    assert newest_whole({0, 4}, {1, 2, 3}) == 4  # the only one that was kept: better a line less than all steps again
    assert newest_whole({0}, set()) == 0
    assert newest_whole(set(), set()) is None


def test_a_line_of_which_a_kill_left_a_part_is_written_whole(folder: RunFolder) -> None:
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":4')
    write(folder, MetricsRecorded("step", 4, "", {"loss": 0.5}))
    assert losses(folder) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5)]


def test_what_a_head_is_told_again_it_writes_once(folder: RunFolder) -> None:
    evaluation = MetricsRecorded("evaluation", 3, "end", {"accuracy": 0.5})
    write(folder, evaluation, MetricsRecorded("step", 3, "", {"loss": 2.0}), evaluation)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines[3:] == [{"kind": "evaluation", "step": 3, "label": "end", "accuracy": 0.5}]


def test_where_the_buffer_stood_is_in_the_log_or_the_run_cannot_go_on(folder: RunFolder) -> None:
    log = folder.events / "head.sqlite"
    assert find_cursor(log, 0) == BufferCursor()
    with pytest.raises(NotResumable, match=r"head\.sqlite: no record of step 2; .* if log\.events is on"):
        find_cursor(log, 2)
    events = EventLog(log)
    for position in (7, 9):  # the step was done twice
        collected = StepCollected(2, 0, StepCounts(), {}, BufferCursor(position))
        events.append(1.0, "recipe", "head/buffer", "StepCollected", None, encode(Envelope("x", "y", collected)))
    events.close()
    assert find_cursor(log, 2).position == 9
