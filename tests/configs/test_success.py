"""The key evaluation.success: its forms and its effects."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.configs.load import load_run
from asterism.configs.schema.success import SuccessRule, parse_success


def load(tmp_path: Path, *overrides: str):
    (tmp_path / "rewards.py").write_text("def score(completions): return [1.0]\n")
    path = tmp_path / "run.toml"
    path.write_text('name = "r"\n[reward.functions]\nmath = "math"\nformat = "rewards.py:score"\n')
    return load_run(path, overrides)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("correct", SuccessRule("correct", ">=", 1.0)),
        ("correct >= 0.5", SuccessRule("correct", ">=", 0.5)),
        ("reward > 0.5", SuccessRule("reward", ">", 0.5)),
        (" reward>=-1e-3 ", SuccessRule("reward", ">=", -0.001)),
        ("verl.tests >= 1", SuccessRule("verl.tests", ">=", 1.0)),
    ],
)
def test_a_criterion_is_a_component_or_a_lower_limit(text: str, rule: SuccessRule) -> None:
    assert parse_success(text) == rule
    assert parse_success(rule.describe()) == rule


def test_a_component_without_a_limit_must_be_complete() -> None:
    rule = parse_success("correct")
    assert [rule.is_met(9.0, {"correct": value}) for value in (0.0, 0.25, 0.99, 1.0, 2.0)] == [False] * 3 + [True] * 2


def test_a_trajectory_without_the_component_does_not_succeed() -> None:
    assert not parse_success("correct >= -5").is_met(1.0, {"format": 1.0})


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_the_default_is_a_reward_above_the_limit(reward: float, limit: float) -> None:
    assert SuccessRule(limit=limit).is_met(reward, {}) == (reward > limit)


def test_without_the_key_roc_positive_above_is_the_limit(tmp_path: Path) -> None:
    assert load(tmp_path).success == SuccessRule()
    assert load(tmp_path, "roc.positive_above=0.5").success == SuccessRule(limit=0.5)


def test_the_key_sets_the_success_rule(tmp_path: Path) -> None:
    assert load(tmp_path, "evaluation.success=math").success == SuccessRule("math", ">=", 1.0)
    assert load(tmp_path, "evaluation.success=format.words > 3").success == SuccessRule("format.words", ">", 3.0)


def test_the_component_of_the_grader_needs_no_reward_functions() -> None:
    assert load_run(None, ["name=r", "evaluation.success=correct"]).success.name == "correct"
