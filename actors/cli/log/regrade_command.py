"""`asterism log regrade`: scores the stored trajectories of a run with other rewards, without an engine."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.cli.console import check_json_path, write_json
from asterism.actors.cli.sandbox_commands import make_sandbox_of_run, suppress_logs
from asterism.actors.launch.checks.task_code_checks import describe_tasks
from asterism.actors.replay.regrading import (
    RegradedTrajectory,
    StoredTrajectory,
    SubmissionBuilder,
    read_rows_by_problem,
    read_stored_trajectories,
    regrade,
)
from asterism.bus.messages import AnswerSubmitted
from asterism.configs.errors import UnusableInput
from asterism.configs.load import list_differences, load_run, load_with_overrides
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema import RunConfig
from asterism.engine.data.task_inputs import load_task_renderers
from asterism.engine.model.tokenizer import load_tokenizer
from asterism.policies.task_counts import divide
from asterism.tasks.hosting.task_services import build_task_services

_SHOWN_CHANGES = 10
_MAX_TEXT = 40


class RegradedRun(msgspec.Struct, frozen=True):
    run: str
    settings: tuple[str, ...]  # `key: value in the run -> other value`
    trajectories: int
    changed: int
    failed: dict[str, int]  # trajectories without a new reward, by failure
    reward: float | None  # means over the trajectories with a new reward
    new_reward: float | None
    changes: tuple[RegradedTrajectory, ...]


def print_regraded(
    folder: RunFolder, task: str, overrides: Sequence[str], json_path: Path | None, console: Console
) -> int:
    """`task`: its name, or empty for all. Returns the exit code: 1 if a trajectory could not be scored.

    Raises UnusableInput.
    """
    check_json_path(json_path)
    suppress_logs()
    if task:  # its part of the resolved configuration has a table [reward] of its own
        overrides = [f"tasks.{task}.{each}" if each.startswith("reward.") else each for each in overrides]
    other = load_with_overrides(folder.config, overrides, ("reward", "sandbox", "tasks"))
    _check_task_name(task, other)
    regraded = asyncio.run(_regrade_run(folder, other, task))
    _print_result(regraded, console)
    write_json(json_path, regraded)
    return 1 if regraded.failed else 0


def _check_task_name(task: str, run: RunConfig) -> None:
    names = [each.name for each in run.tasks]
    if task and task not in names:
        known = f"its tasks are {', '.join(names)}" if names else "it has no [[tasks]]"
        raise UnusableInput(f"--task {task}: the run has no such task; {known}")


async def _regrade_run(folder: RunFolder, other: RunConfig, task: str) -> RegradedRun:
    run = load_run(folder.config)
    sandbox = make_sandbox_of_run(other, folder, "regrade")
    tasks = build_task_services(other, folder, describe_tasks(other, task), sandbox, repeats_calls=True)
    counts, changes = _Counts(), list[RegradedTrajectory]()
    try:
        await sandbox.start()
        async for each in regrade(_iter_submissions(folder, run, other, task, counts), tasks):
            counts.add(each)
            if each.new_reward is not None and each.is_changed:
                changes.append(each)
    finally:
        await tasks.close()
        await sandbox.close()
    if not counts.trajectories:
        raise UnusableInput(f"{folder.events}: no trajectory has finished")
    scored = counts.trajectories - counts.failed.total()
    return RegradedRun(
        run=str(folder.path),
        settings=tuple(list_differences(run, other)),
        trajectories=counts.trajectories,
        changed=len(changes),
        failed=dict(counts.failed),
        reward=divide(counts.reward, scored),
        new_reward=divide(counts.new_reward, scored),
        changes=tuple(changes),
    )


@dataclass
class _Counts:
    trajectories: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])  # by failure
    reward: float = 0.0  # sum over the scored trajectories
    new_reward: float = 0.0

    def add_without_group(self) -> None:
        """A trajectory without its group, which log.keep_steps has removed from the log."""
        self.trajectories += 1
        self.failed["the log no longer has its group"] += 1

    def add(self, trajectory: RegradedTrajectory) -> None:
        self.trajectories += 1
        if trajectory.new_reward is None:
            self.failed[trajectory.failure] += 1
        else:
            self.reward += trajectory.reward
            self.new_reward += trajectory.new_reward


def _iter_submissions(
    folder: RunFolder, run: RunConfig, other: RunConfig, task: str, counts: _Counts
) -> Iterator[tuple[StoredTrajectory, AnswerSubmitted]]:
    """Reads the data files only if the run has logged no rows and the functions need them."""
    tokenizer = load_tokenizer(folder.expand_path(other.model.checkpoint))
    rows: dict[str, bytes] | None = None
    if not run.tasks and other.reward.functions:
        rows = {} if run.reward.functions else read_rows_by_problem(run, folder)
    builder = SubmissionBuilder(load_task_renderers(run, folder, tokenizer), rows)
    for stored in read_stored_trajectories(folder, counts.add_without_group, task):
        yield stored, builder.build(stored)


# ---------------------------------------------------------------- output


def _print_result(regraded: RegradedRun, console: Console) -> None:
    settings = "; ".join(regraded.settings) or "the run's own settings"
    console.print(f"{regraded.run}, graded again with {settings}", markup=False, highlight=False, soft_wrap=True)
    before, after = ("-" if each is None else f"{each:.4f}" for each in (regraded.reward, regraded.new_reward))
    console.print(
        f"{regraded.trajectories:,} trajectories, {regraded.changed:,} with another reward; mean {before} -> {after}",
        highlight=False,
        soft_wrap=True,
    )
    for failure, count in regraded.failed.items():
        console.print(f"{count:,} not scored: {failure}", markup=False, highlight=False, soft_wrap=True)
    if not regraded.changes:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("trajectory", justify="right")
    for title in ("problem", "truth", "answer"):
        table.add_column(title)
    table.add_column("reward", justify="right")
    for each in regraded.changes[:_SHOWN_CHANGES]:
        texts = (_shorten(each.problem), _shorten(each.ground_truth), _shorten(each.answer or each.ending))
        table.add_row(str(each.trajectory_id), *map(escape, texts), f"{each.reward:g} -> {each.new_reward:g}")
    console.print(table)
    if len(regraded.changes) > _SHOWN_CHANGES:
        console.print(f"{len(regraded.changes) - _SHOWN_CHANGES:,} more; --json FILE has all", highlight=False)


def _shorten(text: str) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."
