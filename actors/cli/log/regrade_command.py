"""`asterism log regrade` scores the stored trajectories of a run with other rewards, without an engine."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape

from asterism.actors.cli.console import make_table, print_line
from asterism.actors.cli.log.what_if import Conditions, print_heading
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
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import load_task_renderers
from asterism.engine.hf.tokenizer import load_tokenizer
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


class OtherRewards(NamedTuple):
    """The stored trajectories scored with other rewards. Implements WhatIf. Exit code 1: a score is missing."""

    task: str  # name of the task, or empty for all
    tables = ("reward", "sandbox", "tasks")

    def locate_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Prefix overrides of [reward] with the task, so that they change the task's own table."""
        own = f"tasks.{self.task}." if self.task else ""
        return [f"{own}{each}" if each.startswith("reward.") else each for each in overrides]

    def recompute(self, conditions: Conditions) -> RegradedRun:
        suppress_logs()
        _check_task_name(self.task, conditions.other)
        return asyncio.run(_regrade_run(conditions, self.task))

    def show(self, result: RegradedRun, console: Console) -> int:
        print_heading(console, result.run, "graded again", result.settings)
        before, after = ("-" if each is None else f"{each:.4f}" for each in (result.reward, result.new_reward))
        print_line(
            console,
            f"{result.trajectories:,} trajectories, {result.changed:,} with another reward; mean {before} -> {after}",
        )
        for failure, count in result.failed.items():
            print_line(console, f"{count:,} not scored: {failure}")
        if result.changes:
            _show_changes(result.changes, console)
        return 1 if result.failed else 0


def _show_changes(changes: Sequence[RegradedTrajectory], console: Console) -> None:
    table = make_table(">trajectory", "problem", "truth", "answer", ">reward")
    for each in changes[:_SHOWN_CHANGES]:
        texts = (_shorten(each.problem), _shorten(each.ground_truth), _shorten(each.answer or each.ending))
        table.add_row(str(each.trajectory_id), *map(escape, texts), f"{each.reward:g} -> {each.new_reward:g}")
    console.print(table)
    if len(changes) > _SHOWN_CHANGES:
        print_line(console, f"{len(changes) - _SHOWN_CHANGES:,} more; --json FILE has all")


def _shorten(text: str) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= _MAX_TEXT else f"{line[:_MAX_TEXT]}..."


def _check_task_name(task: str, run: RunConfig) -> None:
    names = [each.name for each in run.tasks]
    if task and task not in names:
        known = f"its tasks are {', '.join(names)}" if names else "it has no [[tasks]]"
        raise UnusableInput(f"--task {task}: the run has no such task; {known}")


async def _regrade_run(conditions: Conditions, task: str) -> RegradedRun:
    folder, run, other = conditions.folder, conditions.run, conditions.other
    sandbox = make_sandbox_of_run(other, folder, "regrade")
    tasks = build_task_services(other, folder, describe_tasks(other, task), sandbox, repeats_calls=True)
    failed, changes = Counter[str](), list[RegradedTrajectory]()
    num_scored, reward, new_reward = 0, 0.0, 0.0
    try:
        await sandbox.start()
        async for each in regrade(_iter_submissions(folder, run, other, task, failed), tasks):
            if each.new_reward is None:
                failed[each.failure] += 1
                continue
            num_scored, reward, new_reward = num_scored + 1, reward + each.reward, new_reward + each.new_reward
            if each.is_changed:
                changes.append(each)
    finally:
        await tasks.close()
        await sandbox.close()
    if not num_scored and not failed:
        raise UnusableInput(f"{folder.events}: no trajectory has finished")
    return RegradedRun(
        run=str(folder.path),
        settings=conditions.settings,
        trajectories=num_scored + failed.total(),
        changed=len(changes),
        failed=dict(failed),
        reward=divide(reward, num_scored),
        new_reward=divide(new_reward, num_scored),
        changes=tuple(changes),
    )


def _iter_submissions(
    folder: RunFolder, run: RunConfig, other: RunConfig, task: str, failed: Counter[str]
) -> Iterator[tuple[StoredTrajectory, AnswerSubmitted]]:
    """Yield each trajectory with its submission. Data files are read only if functions need rows that the log lacks."""
    tokenizer = load_tokenizer(folder.expand_path(other.model.checkpoint))
    rows: dict[str, bytes] | None = None
    if not run.tasks and other.reward.functions:
        rows = {} if run.reward.functions else read_rows_by_problem(run, folder)
    builder = SubmissionBuilder(load_task_renderers(run, folder, tokenizer), rows)
    missing = ("the log no longer has its group",)  # log.keep_steps has removed it
    for stored in read_stored_trajectories(folder, lambda: failed.update(missing), task):
        yield stored, builder.build(stored)
