"""The description of a task's code, and what scores its trajectories.

Deciders, replays and cold starts read the description and never import the code.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from configs.task_options import RewardConfig
from policies.tools.tool_schema import ToolSchema

MATH = "math"  # in reward.functions: the sandbox's grader
CORRECT = "correct"  # component of the grader if there are no reward functions

# tools: functions without a state; environment: an instance for each trajectory, with methods as tools; dialogue: an
# instance for each trajectory, which answers each turn with a turn of the user.
TaskKind = Literal["tools", "environment", "dialogue"]


class TaskDescription(msgspec.Struct, frozen=True):
    """A task with an import path."""

    kind: TaskKind
    tools: tuple[ToolSchema, ...] = ()
    has_reward: bool = False  # the environment has `get_reward`
    is_replayable: bool = False  # calls of a lost instance may be made again

    @property
    def has_instances(self) -> bool:
        return self.kind != "tools"

    @property
    def takes_tools(self) -> bool:
        """A dialogue answers the text of a turn, and so it has no tools."""
        return self.kind != "dialogue"


# By name of the task; a task without an import path has none.
TaskDescriptions = Mapping[str, TaskDescription]


def list_reward_functions(config: RewardConfig, description: TaskDescription | None) -> Mapping[str, str]:
    """By component. Without configured ones it is the grader, or none if the task has instances."""
    if config.functions or (description is not None and description.has_instances):
        return config.functions
    return {CORRECT: MATH}
