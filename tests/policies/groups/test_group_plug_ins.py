"""The group buffer uses advantage estimators and group filters that are named by import path."""

from pathlib import Path

import pytest

from asterism.bus.messages import GroupJudged
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import RlConfig
from asterism.policies.groups.advantages import center_rewards, load_advantage_estimator
from tests.policies.groups.buffers import BufferDriver, get_collected

CODE = """
def double(rewards):
    return [2 * reward for reward in rewards]

def drop_one(rewards):
    return rewards[1:]

def divide_by_zero(rewards):
    return [float("nan")] * len(rewards)

def accept_all(rewards):
    return True

def accept_large(rewards):
    return min(rewards) > 0.5
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> Path:
    path = tmp_path / "plug_in.py"
    path.write_text(CODE)
    return path


def start_step(**rl: object) -> BufferDriver:
    """Start a step with one group of four trajectories."""
    return BufferDriver.start(prompts=1, rollouts=4, max_refill_groups=1, **rl)


def test_advantages_of_a_plug_in_reach_the_learner(plug_in: Path) -> None:
    driver = start_step(advantage_estimator=f"{plug_in}:double")
    driver.end(0, 0, rewards=(0.0, 0.25, 0.5, 1.0))
    (batch,) = driver.batches
    assert [sample.advantage for sample in batch.samples] == [0.0, 0.5, 1.0, 2.0]


def test_dr_grpo_advantages_are_centered_rewards() -> None:
    assert load_advantage_estimator(RlConfig(advantage_estimator="dr_grpo")) is center_rewards
    assert center_rewards([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_groups_that_a_filter_rejects_are_replaced(plug_in: Path) -> None:
    driver = start_step(group_filter=f"{plug_in}:accept_large")
    effects = driver.end(0, 0, rewards=(0.0, 1.0, 1.0, 1.0))
    assert [send.message.verdict for send in effects if isinstance(send.message, GroupJudged)] == ["rejected"]
    effects = driver.end(1, 0, rewards=(0.75, 1.0, 1.0, 1.0))
    assert len(driver.batches[0].samples) == 4
    assert get_collected(effects).counts.totals.groups_rejected == 1


@pytest.mark.parametrize("name", ["all", "accept_all"])
def test_a_filter_can_accept_equal_rewards(plug_in: Path, name: str) -> None:
    driver = start_step(group_filter=name if name == "all" else f"{plug_in}:{name}")
    driver.end(0, 0, rewards=(1.0, 1.0, 1.0, 1.0))
    (batch,) = driver.batches
    assert [sample.advantage for sample in batch.samples] == [0.0] * 4


@pytest.mark.parametrize("name", ["drop_one", "divide_by_zero"])
def test_missing_advantages_and_infinite_advantages_are_refused(plug_in: Path, name: str) -> None:
    driver = start_step(advantage_estimator=f"{plug_in}:{name}")
    with pytest.raises(UnusableInput, match=r"^rl\.advantage_estimator: .* do not fit the rewards"):
        driver.end(0, 0, rewards=(0.0, 0.25, 0.5, 1.0))
