"""The inputs of a run's tasks: descriptions in the run's folder, formats of dialogues, and layouts of rows."""

import msgspec

from configs.atomic_write import write_atomically
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from configs.task_options import TaskConfig
from engine.data.datasets import DatasetProblem, RowLayout
from policies.dialogue.chat_format import DialogueFormat, build_dialogue_format
from policies.tools.task_description import MATH, TaskDescription, TaskDescriptions, list_reward_functions


def write_task_descriptions(folder: RunFolder, descriptions: TaskDescriptions) -> None:
    """Raises OSError."""
    write_atomically(folder.task_descriptions, msgspec.json.format(msgspec.json.encode(descriptions)))


def read_task_descriptions(folder: RunFolder) -> TaskDescriptions:
    """Empty if no task of the run has an import path."""
    path = folder.task_descriptions
    return msgspec.json.decode(path.read_bytes(), type=dict[str, TaskDescription]) if path.exists() else {}


def build_task_formats(run: RunConfig, descriptions: TaskDescriptions) -> dict[str, DialogueFormat]:
    """By name of the task; the only one is "" without [[tasks]]."""
    return {
        task.name: build_dialogue_format(task.get_dialogue(), descriptions.get(task.name))
        for task in run.resolved_tasks
    }


def load_task_formats(run: RunConfig, folder: RunFolder) -> dict[str, DialogueFormat]:
    return build_task_formats(run, read_task_descriptions(folder))


def get_row_layout(task: TaskConfig, description: TaskDescription | None) -> RowLayout:
    """What a row of the task must have. Environments and reward functions get all its columns."""
    functions = list_reward_functions(task.get_reward(), description)
    has_instances = description is not None and description.has_instances
    is_graded = MATH in functions.values()
    return RowLayout(
        all_columns=has_instances or bool(task.get_reward().functions),
        needs_question=not has_instances,
        needs_answer=is_graded or not task.name,
    )


def encode_row(problem: DatasetProblem) -> bytes:
    """The row as a JSON object, with the question and the ground truth as the run uses them."""
    row = {**problem.fields, "question": problem.question, "ground_truth": problem.ground_truth}
    return msgspec.json.encode(row, enc_hook=str)
