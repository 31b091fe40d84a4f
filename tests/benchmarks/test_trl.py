"""The comparison with TRL, without TRL: its figures, and the settings that both sides share."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.support.trl.trl_run import build_settings
from benchmarks.trl import compute_figures, find_seconds_to_reward
from configs.load import load_run
from configs.schema import DataConfig, ModelConfig

ROOT = Path(__file__).parents[2]


def make_steps(*rewards: float) -> list[dict[str, float]]:
    """Step n takes n seconds."""
    return [{"step_s": float(number), "reward": reward} for number, reward in enumerate(rewards, 1)]


def test_the_seconds_to_a_reward_include_the_step_that_reaches_it() -> None:
    assert find_seconds_to_reward(make_steps(0.5, 0.7, 0.8, 0.1)) == 6.0
    assert find_seconds_to_reward(make_steps(0.5, 0.79)) is None


def test_the_first_and_the_last_step_of_a_round_do_not_count_in_its_median() -> None:
    figures = compute_figures([make_steps(0.8, 0.6, 0.6, 0.6), make_steps(0.9, 0.6, 0.6, 0.6)])
    assert figures == {"step_s": 2.5, "reward_s": 1.0, "reward": pytest.approx(0.6625)}
    assert compute_figures([make_steps(0.8, 0.6, 0.6), make_steps(0.6, 0.6, 0.6)])["reward_s"] is None


def test_trl_gets_the_settings_of_the_run() -> None:
    run = load_run(ROOT / "configs/tiny.toml", ["rl.steps=7", "learner.lr=1e-3"])
    run = replace(run, model=ModelConfig(checkpoint="/c"), data=DataConfig(train="/train", test="/test"))
    settings = build_settings(run, threads=2)
    assert (settings.checkpoint, settings.data, settings.threads) == ("/c", "/train", 2)
    assert (settings.steps, settings.prompts, settings.rollouts, settings.minibatches) == (7, 16, 16, 2)
    assert (settings.lr, settings.response_tokens, settings.max_turns) == (1e-3, 160, 4)
    assert settings.prompt_head.startswith("<|im_start|>system\n")
    assert settings.prompt_head.endswith("\\boxed{}.\n\n")


@pytest.mark.slow
def test_without_trl_the_benchmark_names_the_command_that_installs_it() -> None:
    command = [sys.executable, "-m", "benchmarks.trl", "--python", "/nowhere/python"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "make trl-environment" in done.stderr
