"""What a run knows of a task's code: the deciders, replays and cold starts never import it."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from policies.tools.tool_schema import ToolSchema

# tools: functions without a state; environment: an instance per trajectory whose methods are tools; dialogue: an
# instance per trajectory that answers each turn with a turn of the user.
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


# By name of the task; a task without an import path has none.
TaskDescriptions = Mapping[str, TaskDescription]
