"""A launch rolls back to the step that it resumes from, in the batches and the metrics file."""

import asyncio
import json
from pathlib import Path

import pytest

from asterism.actors.launch.launcher import roll_back_to
from asterism.actors.metrics_file import MetricsFile, read_steps_written
from asterism.actors.runtime.resume_point import NotResumable, choose_newest_complete_step, find_cursor
from asterism.analysis.metric_lines import read_metric_lines
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import BufferCursor, Envelope, HealthReported, MetricsRecorded, StepCollected, StepCounts
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.batches.batch_journal import BatchJournal


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Make a run with three steps; the batches of the steps 2 and 3 are in no checkpoint."""
    folder = RunFolder(tmp_path)
    folder.checkpoints.mkdir()
    journal = BatchJournal(folder.batches)
    for step in (2, 3):
        journal.write(step, b"batch")
    write(folder, *(MetricsRecorded("step", step, "", {"loss": 1.0}) for step in (1, 2, 3)))
    return folder


def write(folder: RunFolder, *lines: MetricsRecorded | HealthReported) -> None:
    metrics = MetricsFile(folder.metrics)

    async def write_all() -> None:
        for line in lines:
            await metrics.write(line)

    asyncio.run(write_all())


def losses(folder: RunFolder) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def test_roll_back_deletes_the_batches_of_an_earlier_launch(folder: RunFolder) -> None:
    roll_back_to(folder, 1)
    assert BatchJournal(folder.batches).list_steps() == []


@pytest.mark.parametrize(("step", "remaining"), [(0, []), (1, [(1, 1.0)])])
def test_repeated_steps_get_new_metrics_lines(folder: RunFolder, step: int, remaining: list[tuple[int, float]]) -> None:
    roll_back_to(folder, step)
    assert losses(folder) == remaining
    write(folder, *(MetricsRecorded("step", each, "", {"loss": 0.5}) for each in range(step + 1, 4)))
    assert losses(folder) == [*remaining, *((each, 0.5) for each in range(step + 1, 4))]


def test_a_step_without_a_complete_metrics_line_is_repeated(folder: RunFolder) -> None:
    assert read_steps_written(folder.metrics) == {1, 2, 3}
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":4')  # a kill interrupted the write
    assert read_steps_written(folder.metrics) == {1, 2, 3}
    assert choose_newest_complete_step({0, 2, 4}, {1, 2, 3}) == 2
    # Without an earlier checkpoint, a missing line is better than repeating all steps.
    assert choose_newest_complete_step({0, 4}, {1, 2, 3}) == 4
    assert choose_newest_complete_step({0}, set()) == 0
    assert choose_newest_complete_step(set(), set()) is None


def test_a_partial_last_line_is_replaced(folder: RunFolder) -> None:
    with folder.metrics.open("ab") as file:
        file.write(b'{"kind":"step","step":4')
    write(folder, MetricsRecorded("step", 4, "", {"loss": 0.5}))
    assert losses(folder) == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5)]


def test_duplicate_metrics_are_written_once(folder: RunFolder) -> None:
    evaluation = MetricsRecorded("evaluation", 3, "end", {"accuracy": 0.5})
    write(folder, evaluation, MetricsRecorded("step", 3, "", {"loss": 2.0}), evaluation)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert lines[3:] == [{"kind": "evaluation", "step": 3, "label": "end", "accuracy": 0.5}]


def test_health_reports_are_unique_and_a_roll_back_removes_those_of_later_steps(
    folder: RunFolder,
) -> None:
    write(folder, *(HealthReported(3, check, "warn", "numbers") for check in ("entropy", "entropy", "mismatch")))
    write(folder, HealthReported(1, "entropy", "stop", "numbers"))
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    report = {"step": 3, "check": "entropy", "action": "warn", "message": "numbers", "checks": []}
    assert lines[3] == {"kind": "health", **report}
    reports = [(report["step"], report["check"], report["action"]) for report in read_metric_lines(folder.path).health]
    assert reports == [(3, "entropy", "warn"), (3, "mismatch", "warn"), (1, "entropy", "stop")]
    roll_back_to(folder, 2)
    assert [report["step"] for report in read_metric_lines(folder.path).health] == [1]


def test_a_resume_needs_the_cursor_of_the_buffer_in_the_log(folder: RunFolder) -> None:
    log = folder.events / "head.sqlite"
    assert find_cursor(log, 0) == BufferCursor()
    with pytest.raises(NotResumable, match=r"head\.sqlite: no record of step 2; .* if log\.events is on"):
        find_cursor(log, 2)
    events = EventLog(log)
    for position in (7, 9):  # the step ran twice
        collected = StepCollected(2, 0, StepCounts(), {}, BufferCursor(position))
        events.append(1.0, "recipe", "head/buffer", "StepCollected", None, encode(Envelope("x", "y", collected)))
    events.close()
    assert find_cursor(log, 2).position == 9
