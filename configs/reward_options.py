"""The table [reward]: docs/rewards.md has examples."""

from typing import Literal

from configs.schema_tree import ImportPath, PositiveFloat, Section, SignedFloat, require

Acceptance = Literal["number", "expression", "any"]


class RewardConfig(Section, frozen=True):
    # Answers if the truth is a number: a "number"; also an "expression" of + - * / ^ and roots;
    # "any" that math-verify finds equal, such as the restated question (docs/grading.md).
    accept: Acceptance = "number"
    # Reward functions by name, such as {format = "rewards.py:score_format"}; "math" is the grader (docs/rewards.md).
    # Without any, the reward is that of the grader: 1 for a correct answer, else 0.
    functions: dict[str, ImportPath] = {}  # noqa: RUF012  # msgspec copies the dict
    weights: dict[str, SignedFloat] = {}  # noqa: RUF012  # of components by name; the others have 1
    time_limit_s: PositiveFloat = 60.0  # of a call of a reward function

    def __post_init__(self) -> None:
        for name in self.functions:
            require(name.isidentifier(), f'functions: "{name}" is no name; use letters, digits and _')
