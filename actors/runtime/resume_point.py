"""The step at which a run resumes, and the group buffer's cursor at that step."""

from collections.abc import Set
from pathlib import Path

from actors.metrics_file import read_steps_written
from bus.addresses import HEAD
from bus.event_log.reader import decode_event, read_events
from bus.messages import BufferCursor, StepCollected, StepOutcome
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.learner.checkpoints import list_saved_steps
from policies.early_stopping import describe_outcome


class NotResumable(UnusableInput):
    """A record that resuming needs is missing."""


def find_resume_step(folder: RunFolder) -> int | None:
    """The newest step that has both a checkpoint and a record in the log; None if there is no checkpoint to resume from.

    A kill may leave a checkpoint without its log record or its metrics line; then the step before is chosen. The newest
    recorded step is chosen even without a metrics line if no earlier step has one.
    """
    recorded = {0, *_read_collected_steps(folder.events / f"{HEAD}.sqlite")}
    return choose_newest_complete_step(
        recorded.intersection(list_saved_steps(folder.checkpoints)), read_steps_written(folder.metrics)
    )


def choose_newest_complete_step(steps: Set[int], written: Set[int]) -> int | None:
    return max(steps & written, default=None) or max(steps, default=None)


def find_cursor(log: Path, step: int, first_problem: int = 0) -> BufferCursor:
    """The group buffer's cursor at the end of `step`, from the log. Raises NotResumable."""
    if step == 0:
        return BufferCursor(first_problem)
    collected = _read_collected_steps(log).get(step)
    if collected is None:
        raise NotResumable(f"{log}: no record of step {step}; a run can only be resumed if log.events is on")
    return collected.cursor


def list_earlier_steps(log: Path, run: RunConfig, step: int) -> tuple[StepOutcome, ...]:
    """Up to `step`, that the log still has; none without [early_stopping]."""
    if not run.early_stopping.window_steps or not step:
        return ()
    collected = _read_collected_steps(log)
    return tuple(describe_outcome(collected[each]) for each in sorted(collected) if each <= step)


def _read_collected_steps(log: Path) -> dict[int, StepCollected]:
    """By step. If a step ran twice, as after a resume, the later record counts."""
    messages = (
        [decode_event(log, event).message for event, _ in read_events(log, kinds=["StepCollected"])]
        if log.exists()
        else []
    )
    return {message.step: message for message in messages if isinstance(message, StepCollected)}
