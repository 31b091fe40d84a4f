"""The step at which a run resumes, and the group buffer's cursor at that step."""

from collections.abc import Set
from pathlib import Path

from actors.metrics_file import read_steps_written
from bus.addresses import HEAD
from bus.event_log.reader import decode_event, read_events
from bus.messages import BufferCursor, StepCollected
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from engine.learner.checkpoints import list_saved_steps


class NotResumable(UnusableInput):
    """A record that resuming needs is missing."""


def find_resume_step(folder: RunFolder) -> int | None:
    """The newest step that has both a checkpoint and a record in the log; None if there is no checkpoint to resume from.

    A kill may leave a checkpoint without its log record or its metrics line; then the step before is chosen. The newest
    recorded step is chosen even without a metrics line if no earlier step has one.
    """
    recorded = {0, *_read_cursors(folder.events / f"{HEAD}.sqlite")}
    return choose_newest_complete_step(
        recorded.intersection(list_saved_steps(folder.checkpoints)), read_steps_written(folder.metrics)
    )


def choose_newest_complete_step(steps: Set[int], written: Set[int]) -> int | None:
    return max(steps & written, default=None) or max(steps, default=None)


def find_cursor(log: Path, step: int) -> BufferCursor:
    """The group buffer's cursor at the end of `step`, from the log. Raises NotResumable."""
    if step == 0:
        return BufferCursor()
    cursor = _read_cursors(log).get(step)
    if cursor is None:
        raise NotResumable(f"{log}: no record of step {step}; a run can only be resumed if log.events is on")
    return cursor


def _read_cursors(log: Path) -> dict[int, BufferCursor]:
    """By step. If a step ran twice, as after a resume, the later record counts."""
    messages = (
        [decode_event(log, event).message for event, _ in read_events(log, kinds=["StepCollected"])]
        if log.exists()
        else []
    )
    return {message.step: message.cursor for message in messages if isinstance(message, StepCollected)}
