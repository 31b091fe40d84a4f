"""The tables [[tasks]] and [reward]: docs/tasks.md and docs/rewards.md have examples."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.schema_tree import (
    FilePath,
    ImportPath,
    PositiveFloat,
    PositiveInt,
    Section,
    SignedFloat,
    TaskName,
    require,
)

Acceptance = Literal["number", "expression", "any"]
GRADER_COMPONENT = "correct"  # name of the grader's component, if there are no reward functions


class RewardConfig(Section, frozen=True):
    # Accepted answers if the truth is a number. number: numbers; expression: also terms of + - * / ^ and roots;
    # any: all that math-verify finds equal, such as the restated question (docs/grading.md).
    accept: Acceptance = "number"
    # Reward functions by name, such as {format = "rewards.py:score_format"}; "math" is the grader (docs/rewards.md).
    # Without functions, the grader gives 1 for a correct answer, else 0.
    functions: dict[str, ImportPath] = {}  # noqa: RUF012  # msgspec copies the dict
    weights: dict[str, SignedFloat] = {}  # noqa: RUF012  # weights of components by name; other components have 1
    time_limit_s: PositiveFloat = 60.0  # time limit of a call of a reward function

    def __post_init__(self) -> None:
        for name in self.functions:
            require(name.isidentifier(), f'functions: "{name}" is no name; use letters, digits and _')


class TaskConfig(Section, frozen=True, kw_only=True):
    """Rows of data, and the tools, environment or dialogue that they are solved with."""

    name: TaskName  # name of the task in metrics and logs
    # Tool functions, an environment or a dialogue; empty: only the tools of [dialogue] (docs/tasks.md).
    import_path: ImportPath = msgspec.field(name="import", default="")
    data: FilePath  # training rows
    test: FilePath = ""  # rows for evaluations; empty: none
    weight: PositiveFloat = 1.0  # share of the groups, relative to the other tasks
    parameters: dict[str, Any] = {}  # noqa: RUF012  # arguments of the environment's or the dialogue's constructor
    call_limit_s: PositiveFloat = 30.0  # time limit of a tool call, and of a call of `reset`, `step` and `get_reward`
    processes: PositiveInt = 1  # processes per executor, each with its part of the instances
    python: FilePath = ""  # interpreter of these processes, with the task's packages; empty: the run's own
    variables: dict[str, str] = {}  # noqa: RUF012  # environment variables of these processes
    dialogue: DialogueConfig | None = None  # keys of [dialogue] that differ for this task
    reward: RewardConfig | None = None  # keys of [reward] that differ for this task

    @property
    def key_prefix(self) -> str:
        """The prefix of the task's keys in messages."""
        return f"tasks.{self.name}." if self.name else ""

    def get_dialogue(self) -> DialogueConfig:
        """Return the dialogue of a task of RunConfig.resolved_tasks."""
        assert self.dialogue is not None
        return self.dialogue

    def get_reward(self) -> RewardConfig:
        """Return the reward of a task of RunConfig.resolved_tasks."""
        assert self.reward is not None
        return self.reward


def check_tasks(tasks: tuple[TaskConfig, ...]) -> None:
    """Raise ValueError if two tasks have the same name, or a text names tools that the task lacks."""
    names = [task.name for task in tasks]
    repeated = next((name for name in names if names.count(name) > 1), "")
    require(not repeated, f'tasks: the name "{repeated}" is used twice')
    require(
        len({task.get_reward().accept for task in tasks}) == 1,
        "tasks: reward.accept must be the same for all tasks; set it in [reward]",
    )
    for task in tasks:
        _check_weights(task)
        where = f'tasks: "{task.name}": dialogue.system' if task.name else "dialogue.system"
        require(
            bool(task.import_path) or not task.get_dialogue().lacks_tools,
            f"{where} must not contain {{tools}} without tools; add a tool, or remove {{tools}}",
        )


def may_have_component(task: TaskConfig, name: str) -> bool:
    """Return whether a trajectory can have the component; environments and dialogues name their own."""
    functions = task.get_reward().functions
    names = functions or ((GRADER_COMPONENT,) if not task.import_path else ())
    is_metric = name.partition(".")[0] in functions  # a function adds metrics as FUNCTION.METRIC
    return name in names or is_metric or bool(task.import_path)


def _check_weights(task: TaskConfig) -> None:
    """Check that each weight has a function, or that the task can have further components."""
    reward = task.get_reward()
    unknown = [name for name in reward.weights if name not in reward.functions and not task.import_path]
    where = f'tasks: "{task.name}": reward.weights' if task.name else "reward.weights"
    require(not unknown, f"{where}.{''.join(unknown[:1])}: reward.functions has no such function")
