"""The description of a task: its texts, its tools, and the reward of its trajectories.

Deciders, replays and cold starts read the description and never import the task's code.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.success import REWARD, SuccessRule
from asterism.configs.schema.tasks import GRADER_COMPONENT, RewardConfig, TaskConfig
from asterism.policies.tools.tool_schema import ToolSchema

MATH = "math"  # name of the sandbox's grader in reward.functions
DEFAULT_SYSTEM = "You are a helpful assistant."
# Kinds of tasks: "tools" has functions without a state; "environment" has an instance for each trajectory, with methods
# as tools; "dialogue" has an instance for each trajectory, which answers each turn with a turn of the user.
TaskKind = Literal["tools", "environment", "dialogue"]


class TaskDescription(msgspec.Struct, frozen=True):
    """The description of the task at an import path, or of asterism.tasks.math_python without an import path.

    The configured answer tags replace {answer} in the texts.
    """

    kind: TaskKind
    tools: tuple[ToolSchema, ...] = ()
    system: str = DEFAULT_SYSTEM  # system prompt without the instructions for calls
    system_without_tools: str = ""  # empty: `system`
    tag_instruction: str = ""  # text after `system`, except with a renderer
    instruction: str = ""  # text before each question
    has_boxed_answer: bool = False  # false: the text in the answer tags, or the whole last turn, is also an answer
    has_reward: bool = False  # the environment has `get_reward`
    is_replayable: bool = False  # calls of a lost instance may be repeated

    @property
    def has_instances(self) -> bool:
        return self.kind != "tools"

    @property
    def takes_tools(self) -> bool:
        """False for a dialogue, which answers the text of a turn."""
        return self.kind != "dialogue"


TaskDescriptions = Mapping[str, TaskDescription]  # by task name


def list_reward_functions(config: RewardConfig, description: TaskDescription) -> Mapping[str, str]:
    """Return the reward functions by component. The default is the grader, or no function for a task with instances."""
    if config.functions or description.has_instances:
        return config.functions
    return {GRADER_COMPONENT: MATH}


def has_binary_reward(run: RunConfig, descriptions: TaskDescriptions) -> bool:
    """Return whether the grader is the only reward of all tasks: 1 for a correct answer, else 0."""
    tasks = [task for task in run.resolved_tasks if task.name in descriptions]
    return all(
        not descriptions[task.name].has_instances
        and set(list_reward_functions(task.get_reward(), descriptions[task.name]).values()) == {MATH}
        for task in tasks
    )


def choose_accuracy_label(run: RunConfig, descriptions: TaskDescriptions) -> str:
    """Return the name of the share of successes: "accuracy", or the default success rule of a shaped reward."""
    is_defined = bool(run.evaluation.success) or has_binary_reward(run, descriptions)
    return "accuracy" if is_defined else run.success.describe()


def list_success_warnings(task: TaskConfig, description: TaskDescription, success: SuccessRule) -> list[str]:
    """Warn if a wrong answer can be a success, assuming that reward functions return at most 1.

    The components of environments are unknown before the run.
    """
    if success.name != REWARD:
        return []
    reward = task.get_reward()
    functions = list_reward_functions(reward, description)
    weights = {name: max(reward.weights.get(name, 1.0), 0.0) for name in functions}
    graded = [name for name, spec in functions.items() if spec == MATH]
    others = [name for name in functions if weights[name] > 0 and name not in graded]
    if len(functions) < 2 or not others or not success.is_met(sum(weights[name] for name in others), {}):
        return []
    named = " and ".join(f"{task.key_prefix}reward.functions.{name}" for name in others)
    example = (graded or others)[0]
    return [
        f"{named} can make a wrong answer a success, because every {success.describe()} counts as correct, in accuracy "
        f'and for the positives of RoC; name the component that decides, such as evaluation.success = "{example}"'
    ]
