"""A stage that continues another stage has an ordinary run's configuration, which needs nothing of [[stages]]."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asterism.actors.runtime.resume_point import find_cursor
from asterism.actors.stages.solved_problems import ProblemResults, read_problem_results, write_unsolved_rows
from asterism.bus.addresses import HEAD
from asterism.configs.errors import UnusableInput
from asterism.configs.load import expand_paths
from asterism.configs.loading.stage_layers import StageConfig
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import get_row_layout, read_task_descriptions
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps


class FinishedStage(NamedTuple):
    run: RunConfig
    folder: RunFolder

    def find_last_checkpoint(self) -> tuple[int, Path]:
        """Return step and folder. Raises UnusableInput if the checkpoint was deleted."""
        steps = list_saved_steps(self.folder.checkpoints)
        if not steps:
            raise UnusableInput(f"{self.folder.checkpoints}: no checkpoint from which the next stage could continue")
        return steps[-1], self.folder.get_checkpoint_path(steps[-1])


class StageStart(NamedTuple):
    """Checkpoint and data position with which a stage continues the previous stage."""

    checkpoint: str  # absolute path
    first_problem: int


def check_stage(run: RunConfig, options: StageConfig, before: RunConfig) -> None:
    """Check what this stage reads of the previous one: its logs, and for `unsolved` its tasks. Raises UnusableInput."""
    prefix = f"stages: {options.name}: "
    if options.problems == "all":
        if options.problem_order == "continue" and not before.log.events:
            raise UnusableInput(
                f'{prefix}problem_order = "continue" reads the event log of the stage before; set log.events = true, '
                'or problem_order = "restart"'
            )
        return
    if before.log.level not in ("debug", "info"):
        raise UnusableInput(
            f'{prefix}problems = "unsolved" reads the structured logs of the stage before; set log.level = "info" '
            f'instead of "{before.log.level}"'
        )
    own, tasks = ({task.name for task in each.resolved_tasks} for each in (run, before))
    if own != tasks:
        raise UnusableInput(
            f'{prefix}problems = "unsolved" needs the tasks of the stage before: {_list_names(tasks)} '
            f"instead of {_list_names(own)}"
        )


def find_start(run: RunConfig, options: StageConfig, before: FinishedStage, first: RunFolder) -> StageStart:
    """Find the start of a stage that has not begun. New data start at `rl.first_problem`. Raises UnusableInput."""
    step, checkpoint = before.find_last_checkpoint()
    first_problem = run.rl.first_problem
    if (
        options.problems == "all"
        and options.problem_order == "continue"
        and _list_training_files(run, first) == _list_training_files(before.run, first)
    ):
        first_problem = find_cursor(before.folder.events / f"{HEAD}.sqlite", step).position
    return StageStart(str(checkpoint.resolve()), first_problem)


def read_start(run: RunConfig) -> StageStart:
    """Return the start of a stage that has begun with `run`. The files of the previous stage can be deleted."""
    return StageStart(run.learner.resume_from, run.rl.first_problem)


def continue_stage(run: RunConfig, options: StageConfig, start: StageStart, first: RunFolder) -> RunConfig:
    """Return `run` with weights and, as configured, moments, data position and unsolved problems of the previous one.

    `first` is the folder of the first stage, to which `$RUN` refers in all stages.
    """
    expanded = expand_paths(run, RunFolder(first.path.resolve()))
    table: dict[str, Any] = {**msgspec.to_builtins(expanded), "prepare": None}
    table["model"]["checkpoint"] = table["learner"]["resume_from"] = start.checkpoint
    table["learner"]["resume_optimizer"] = options.optimizer == "keep"
    table["sft"] |= {"steps": 0, "epochs": 0}
    if options.problems == "unsolved":
        tables = {task["name"]: (task, "data") for task in table["tasks"]} or {"": (table["data"], "train")}
        for name, (task, key) in tables.items():
            task[key] = str(_get_unsolved_path(first, options, name).resolve())
    elif options.problem_order == "continue":
        table["rl"]["first_problem"] = start.first_problem
    return msgspec.convert(table, RunConfig)


def write_unsolved(
    options: StageConfig, before: FinishedStage, first: RunFolder, print_line: Callable[[str], None]
) -> None:
    """Write the problems of each task that the previous stage has not solved. Raises UnusableInput and DiskError."""
    results = read_problem_results(before.folder, before.run.success)
    descriptions = read_task_descriptions(before.folder)
    for task in before.run.resolved_tasks:
        target = _get_unsolved_path(first, options, task.name)
        layout = get_row_layout(task, descriptions[task.name])
        source, limit = before.folder.expand_path(task.data), before.run.data.max_bad_rows
        found = results.get(task.name, ProblemResults(set(), set()))
        count = write_unsolved_rows(source, layout, found, target, limit)
        print_line(
            f"{target}: {count.unsolved:,} of {count.problems:,} problems; stage {before.run.name} solved the other "
            f"{count.solved:,} in all rollouts"
        )
        if count.unvisited:
            print_line(
                f"warning: {count.unvisited:,} of these {count.unsolved:,} problems are not known to be hard: stage "
                f"{before.run.name} ended before a group of them. Increase its rl.steps or rl.prompts to visit all problems"
            )


def _get_unsolved_path(first: RunFolder, options: StageConfig, task: str) -> Path:
    return first.path.parent / f"unsolved_{options.name}{f'_{task}' if task else ''}.jsonl"


def _list_training_files(run: RunConfig, first: RunFolder) -> list[tuple[str, Path]]:
    return [(task.name, first.expand_path(task.data).resolve()) for task in run.resolved_tasks]


def _list_names(tasks: Collection[str]) -> str:
    return ", ".join(sorted(tasks)) if any(tasks) else "those of [data]"
