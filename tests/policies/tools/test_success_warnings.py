"""The warning about a component that can make a wrong answer a success."""

import pytest

from asterism.configs.schema.success import SuccessRule, parse_success
from asterism.configs.schema.tasks import RewardConfig, TaskConfig
from asterism.policies.tools.task_description import TaskDescription, list_success_warnings

TOOLS = TaskDescription("tools")


def list_warnings(
    functions: dict[str, str], weights: dict[str, float] | None = None, success: SuccessRule | None = None
) -> list[str]:
    reward = RewardConfig(functions=functions, weights=weights or {})
    task = TaskConfig(name="sql", data="rows.jsonl", reward=reward)
    return list_success_warnings(task, TOOLS, success or SuccessRule())


def test_a_warning_names_the_second_component_and_the_remedy() -> None:
    (warning,) = list_warnings({"correct": "math", "format": "r.py:f"}, {"format": 0.1})
    assert warning.startswith("tasks.sql.reward.functions.format can make a wrong answer a success")
    assert warning.endswith('such as evaluation.success = "correct"')


@pytest.mark.parametrize(
    ("functions", "weights", "success"),
    [
        ({}, {}, SuccessRule()),
        ({"correct": "math"}, {}, SuccessRule()),
        ({"score": "r.py:f"}, {}, SuccessRule()),
        ({"correct": "math", "format": "r.py:f"}, {}, parse_success("correct")),
        ({"correct": "math", "format": "r.py:f"}, {"format": 0.1}, parse_success("reward > 0.5")),
        ({"correct": "math", "format": "r.py:f"}, {"format": 0.0}, SuccessRule()),
        ({"correct": "math", "length": "r.py:f"}, {"length": -1.0}, SuccessRule()),
    ],
)
def test_components_that_cannot_reach_the_limit_give_no_warning(
    functions: dict[str, str], weights: dict[str, float], success: SuccessRule
) -> None:
    assert list_warnings(functions, weights, success) == []


def test_a_warning_names_both_functions_if_the_task_has_no_grader() -> None:
    (warning,) = list_warnings({"tests": "r.py:f", "style": "r.py:g"})
    assert "tasks.sql.reward.functions.tests and tasks.sql.reward.functions.style can make" in warning
