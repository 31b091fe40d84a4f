"""The tables [early_stopping] and [[stages]]: docs/stages.md has examples."""

from typing import Literal

from configs.health_options import Share
from configs.schema_tree import Count, NonNegativeFloat, Section, TaskName, require


class EarlyStoppingConfig(Section, frozen=True):
    """Rules that end RL before rl.steps; one more step is trained after the step at which a rule holds."""

    window_steps: Count = 0  # steps of the means; 0: no early stopping
    min_steps: Count = 0  # steps before a rule can hold
    # The mean reward of a window must exceed that of the window before by this; 0: no such rule.
    min_reward_gain: NonNegativeFloat = 0.0
    max_overlong_share: Share = 0.0  # of responses that the length limit ends, mean of a window; 0: no such rule

    def __post_init__(self) -> None:
        has_rule = self.min_reward_gain > 0 or self.max_overlong_share > 0
        require(
            has_rule == (self.window_steps > 0),
            "window_steps needs min_reward_gain or max_overlong_share, and they need window_steps",
        )


class StageConfig(Section, frozen=True, kw_only=True):
    """The keys of a stage that are not keys of a run."""

    name: TaskName  # of the stage's folder in that of the run
    # Training problems. unsolved: without those that the stage before solved in all rollouts of their last group.
    problems: Literal["all", "unsolved"] = "all"
    optimizer: Literal["keep", "reset"] = "keep"  # moments of the stage before
    problem_order: Literal["continue", "restart"] = "continue"  # from the position of the stage before, if "all"
