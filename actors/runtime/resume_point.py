"""The resume point is the step at which a run resumes, and the group buffer's cursor at that step."""

from collections.abc import Callable, Set
from pathlib import Path

from asterism.actors.metrics_file import read_steps_written
from asterism.bus.addresses import HEAD
from asterism.bus.event_log.reader import read_messages
from asterism.bus.messages import BufferCursor, StepCollected, StepOutcome
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    find_training_damage,
    is_resumable,
    list_saved_steps,
    list_set_aside,
    list_without_state,
    set_aside,
)
from asterism.policies.early_stopping import describe_outcome


class NotResumable(UnusableInput):
    """A record that a resume needs is missing."""


def choose_resume_step(folder: RunFolder, run: RunConfig, print_line: Callable[[str], None]) -> int | None:
    """Return the newest step from which the run can resume with a complete checkpoint, or None to begin anew.

    Damaged checkpoints of newer steps keep their files under another name, and `print_line` gets a line about each.
    The cursor and the metrics then follow from the older step. Reads the files that
    training needs. Raises NotResumable if every checkpoint is damaged.
    """

    def set_damaged_aside(damaged_step: int, damage: str) -> None:
        aside = set_aside(folder.get_checkpoint_path(damaged_step))
        print_line(f"the checkpoint of step {damaged_step} is damaged ({damage}); it is set aside as {aside}")

    for lost, path in list_without_state(folder.checkpoints):
        set_damaged_aside(lost, f"{path / 'trainer' / 'state.json'}: missing")
    while (step := find_resume_step(folder)) is not None:
        damage = find_training_damage(folder.get_checkpoint_path(step))
        if damage is None:
            break
        set_damaged_aside(step, damage)
    if step is None and (damaged := list_set_aside(folder.checkpoints)):
        raise NotResumable(
            f"{folder.checkpoints}: no whole checkpoint; damaged are {', '.join(path.name for path in damaged)}: restore "
            "one of them from a copy under its name step_NNNNNN, or start again with --overwrite"
        )
    if step is None:
        _set_aside_damaged_cold_start(folder, print_line)
    elif step and (run.learner.lora.rank or run.learner.loss.kl_coef):
        _check_first_checkpoint(folder)
    return step


def _set_aside_damaged_cold_start(folder: RunFolder, print_line: Callable[[str], None]) -> None:
    checkpoint = folder.partial_cold_start
    if is_resumable(checkpoint) and (damage := find_training_damage(checkpoint)) is not None:
        aside = set_aside(checkpoint)
        print_line(f"the checkpoint within the cold start is damaged ({damage}); it is set aside as {aside}")
        print_line("the cold start begins again")


def _check_first_checkpoint(folder: RunFolder) -> None:
    """Check the checkpoint of step 0: adapters and learner.loss.kl_coef need its weights at any step."""
    if (damage := find_training_damage(folder.get_checkpoint_path(0))) is not None:
        raise NotResumable(
            f"{damage}; only this checkpoint has the weights before RL, which learner.lora.rank and learner.loss.kl_coef "
            "need: restore it from a copy, or start again with --overwrite"
        )


def find_resume_step(folder: RunFolder) -> int | None:
    """Return the newest step with both a checkpoint and a record in the log, or None without such a checkpoint.

    A kill may leave a checkpoint without its log record or its metrics line; then an earlier step is chosen. The newest
    recorded step is chosen even without a metrics line if no earlier step has one.
    """
    recorded = {0, *_read_collected_steps(folder.events / f"{HEAD}.sqlite")}
    return choose_newest_complete_step(
        recorded.intersection(list_saved_steps(folder.checkpoints)), read_steps_written(folder.metrics)
    )


def choose_newest_complete_step(steps: Set[int], written: Set[int]) -> int | None:
    return max(steps & written, default=None) or max(steps, default=None)


def find_cursor(log: Path, step: int, first_problem: int = 0) -> BufferCursor:
    """Read the group buffer's cursor at the end of `step` from the log. Raises NotResumable."""
    if step == 0:
        return BufferCursor(first_problem)
    collected = _read_collected_steps(log).get(step)
    if collected is None:
        raise NotResumable(f"{log}: no record of step {step}; a run can only be resumed if log.events is on")
    return collected.cursor


def list_earlier_steps(log: Path, run: RunConfig, step: int) -> tuple[StepOutcome, ...]:
    """List the outcomes up to `step` that the log still has, or none without [early_stopping]."""
    if not run.early_stopping.window_steps or not step:
        return ()
    collected = _read_collected_steps(log)
    return tuple(describe_outcome(collected[each]) for each in sorted(collected) if each <= step)


def _read_collected_steps(log: Path) -> dict[int, StepCollected]:
    """Read the records by step. If a step ran twice, as after a resume, the later record counts."""
    return {message.step: message for _, message in read_messages(log, StepCollected)} if log.exists() else {}
