"""What the rows of a task must have, and how its environments and reward functions get them."""

import msgspec

from configs.task_options import TaskConfig
from engine.data.datasets import DatasetProblem, RowLayout
from policies.tools.task_description import TaskDescription
from tasks.hosting.answer_scorer import MATH, list_reward_functions


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
