"""What follows from a task's configuration and description: its reward functions, and the layout of its rows."""

from collections.abc import Mapping

import msgspec

from configs.task_options import RewardConfig, TaskConfig
from engine.data.datasets import DatasetProblem, RowLayout
from policies.tools.task_description import TaskDescription

MATH = "math"  # in reward.functions: the sandbox's grader
CORRECT = "correct"  # component of the grader if there are no reward functions


def list_reward_functions(config: RewardConfig, description: TaskDescription | None) -> Mapping[str, str]:
    """By component. Without configured ones it is the grader, or none if the task has instances."""
    if config.functions or (description is not None and description.has_instances):
        return config.functions
    return {CORRECT: MATH}


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
