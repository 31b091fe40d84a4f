"""The configuration of a stage that continues another one: an ordinary run, which needs nothing of [[stages]]."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from actors.runtime.resume_point import find_cursor
from actors.stages.solved_problems import read_solved_problems, write_unsolved_rows
from bus.addresses import HEAD
from configs.errors import UnusableInput
from configs.load import expand_paths
from configs.loading.stage_layers import StageConfig
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.data.task_inputs import get_row_layout, read_task_descriptions
from engine.learner.checkpoints import list_saved_steps


class FinishedStage(NamedTuple):
    run: RunConfig
    folder: RunFolder

    def find_last_checkpoint(self) -> tuple[int, Path]:
        """Step and folder. Raises UnusableInput if it was deleted."""
        steps = list_saved_steps(self.folder.checkpoints)
        if not steps:
            raise UnusableInput(f"{self.folder.checkpoints}: no checkpoint from which the next stage could continue")
        return steps[-1], self.folder.get_checkpoint_path(steps[-1])


def continue_stage(
    run: RunConfig,
    options: StageConfig,
    before: FinishedStage,
    first: RunFolder,
    data_folder: Path,
    print_line: Callable[[str], None],
) -> RunConfig:
    """`run` with the weights, and as configured the moments, the data position and the unsolved problems of `before`.

    `first`: the folder of the first stage, which `$RUN` means in all stages. Writes the unsolved problems into
    `data_folder`. Raises UnusableInput and DiskError.
    """
    step, checkpoint = before.find_last_checkpoint()
    expanded = expand_paths(run, RunFolder(first.path.resolve()))
    table: dict[str, Any] = {**msgspec.to_builtins(expanded), "tiny": None}
    table["model"]["checkpoint"] = table["learner"]["resume_from"] = str(checkpoint.resolve())
    table["learner"]["resume_optimizer"] = options.optimizer == "keep"
    table["sft"] |= {"steps": 0, "epochs": 0}
    if options.problems == "unsolved":
        _select_unsolved(table, options, before, data_folder, print_line)
    elif options.problem_order == "continue":
        table["rl"]["first_problem"] = find_cursor(before.folder.events / f"{HEAD}.sqlite", step).position
    return msgspec.convert(table, RunConfig)


def _select_unsolved(
    table: dict[str, Any],
    options: StageConfig,
    before: FinishedStage,
    data_folder: Path,
    print_line: Callable[[str], None],
) -> None:
    """Replace the training data of each task by the problems of the stage before that it has not solved."""
    if before.run.log.level not in ("debug", "info"):
        raise UnusableInput(
            f'stages: problems = "unsolved" of {options.name} reads the structured logs of the stage before; set '
            f'log.level = "info" instead of "{before.run.log.level}"'
        )
    tasks = {task.name: task for task in before.run.resolved_tasks}
    own = {each["name"]: each for each in table["tasks"]} or {"": table["data"]}
    if own.keys() != tasks.keys():
        raise UnusableInput(
            f'stages: problems = "unsolved" of {options.name} needs the tasks of the stage before: {_list_names(tasks)} '
            f"instead of {_list_names(own)}"
        )
    solved = read_solved_problems(before.folder, before.run.roc.positive_above)
    descriptions = read_task_descriptions(before.folder)
    for task in tasks.values():
        target = data_folder / f"unsolved_{options.name}{f'_{task.name}' if task.name else ''}.jsonl"
        layout = get_row_layout(task, descriptions[task.name])
        count = write_unsolved_rows(before.folder.expand_path(task.data), layout, solved.get(task.name, ()), target)
        print_line(
            f"{target}: {count.unsolved:,} of {count.problems:,} problems; stage {before.run.name} solved the other "
            f"{count.solved:,} in all rollouts"
        )
        own[task.name]["data" if task.name else "train"] = str(target.resolve())


def _list_names(tasks: Collection[str]) -> str:
    return ", ".join(sorted(tasks)) if any(tasks) else "those of [data]"
