"""The comparison with TRL, tested without TRL: its figures, and the settings that both sides share."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.configs.load import load_run
from asterism.configs.schema.run_config import DataConfig, ModelConfig
from asterism.policies.groups.selection import SelectionRules
from benchmarks.support.tiny_run import from_checkpoint
from benchmarks.trl.__main__ import (
    EVERY_ROLLOUT,
    combine_figures,
    compute_curve,
    compute_figures,
    find_seconds_to_reward,
)
from benchmarks.trl.trl_run import TrlFailed, build_settings, count_micro_batches, run_trl
from tests.benchmarks.programs import ROOT, run_program


def make_steps(*rewards: float) -> list[dict[str, float]]:
    """Make steps with these rewards. Step n takes n seconds."""
    return [{"step_s": float(number), "reward": reward} for number, reward in enumerate(rewards, 1)]


def test_the_seconds_to_a_reward_include_the_step_that_reaches_it() -> None:
    assert find_seconds_to_reward(make_steps(0.5, 0.7, 0.8, 0.1)) == 6.0
    assert find_seconds_to_reward(make_steps(0.5, 0.79)) is None


def test_the_median_of_a_round_excludes_its_first_and_last_step() -> None:
    figures = compute_figures([make_steps(0.8, 0.6, 0.6, 0.6), make_steps(0.9, 0.6, 0.6, 0.6)])
    assert (figures["step_s"], figures["reward_s"], figures["reward"]) == (2.5, 1.0, pytest.approx(0.6625))
    assert compute_figures([make_steps(0.8, 0.6, 0.6), make_steps(0.6, 0.6, 0.6)])["reward_s"] is None


def test_the_curve_has_the_mean_seconds_and_reward_at_the_end_of_each_step() -> None:
    assert compute_curve([make_steps(0.2, 0.4), make_steps(0.4, 0.8)]) == [(1.0, 0.3), (3.0, 0.6)]


def test_micro_batches_are_equal_and_have_at_most_the_given_rows() -> None:
    assert [count_micro_batches(rows, 8) for rows in (4, 8, 32, 36, 13)] == [1, 1, 4, 6, 13]


def test_rows_and_tokens_of_a_step_without_an_update_count_as_zero() -> None:
    steps = make_steps(0.5, 0.5, 0.5, 0.5)
    steps[1] |= {"rows": 128.0, "tokens": 4000.0}
    figures = compute_figures([steps])
    assert (figures["rows"], figures["tokens"]) == (64.0, 2000.0)


def test_the_ratios_compare_each_kind_of_run_with_trl() -> None:
    by_kind = {
        kind: {"step_s": seconds, "reward_s": None} for kind, seconds in (("", 2.0), ("roc_", 1.0), ("trl_", 6.0))
    }
    assert combine_figures(by_kind) == {
        **{"step_s": 2.0, "roc_step_s": 1.0, "trl_step_s": 6.0, "ratio": 3.0, "roc_ratio": 6.0},
        **{"reward_s": None, "roc_reward_s": None, "trl_reward_s": None},
    }


def test_the_run_compared_with_trl_trains_on_every_rollout() -> None:
    rules = SelectionRules.from_config(load_run(ROOT / "configs/tiny.toml", EVERY_ROLLOUT))
    assert not rules.roc.enabled
    assert rules.accepts_rewards([1.0] * 16)


def test_trl_gets_the_settings_of_the_run() -> None:
    run = load_run(ROOT / "configs/tiny.toml", ["rl.steps=7", "learner.optimizer.lr=1e-3"])
    run = replace(run, model=ModelConfig(checkpoint="/c"), data=DataConfig(train="/train", test="/test"))
    settings = build_settings(run, threads=2)
    assert (settings.checkpoint, settings.data, settings.threads) == ("/c", "/train", 2)
    assert (settings.steps, settings.prompts, settings.rollouts, settings.minibatches) == (7, 16, 16, 2)
    assert (settings.lr, settings.response_tokens, settings.max_turns) == (1e-3, 160, 4)
    assert (settings.prefill, settings.micro_batches) == ("<reason>", 1)
    assert build_settings(run, threads=2, micro_batch_rows=8).micro_batches == 16
    assert settings.prompt_head.startswith("<|im_start|>system\n")
    assert settings.prompt_head.endswith("\\boxed{}.\n\n")


def test_run_and_trl_train_on_the_questions_that_the_cold_start_has_prepared(tmp_path: Path) -> None:
    config = tmp_path / "words.toml"
    config.write_text(
        'name = "words"\nprepare.import = "words:Words"\ntasks = [{name = "w", data = "$RUN/data/w.jsonl"}]\n'
    )
    checkpoint = tmp_path / "cold" / "checkpoints" / "step_000000"
    run = from_checkpoint(config, ["dialogue.prefill=''", "rl.prompts=2"], checkpoint, steps=7)
    settings = build_settings(run, threads=1)
    assert [task.data for task in run.tasks] == [settings.data] == [str(tmp_path / "cold/data/w.jsonl")]
    assert (settings.checkpoint, settings.prefill, settings.prompts, settings.steps) == (str(checkpoint), "", 2, 7)


@pytest.mark.slow
@pytest.mark.parametrize("python", ["/nowhere/python", sys.executable])
def test_without_trl_the_benchmark_names_the_command_that_installs_it(python: str) -> None:
    command = [sys.executable, "-m", "benchmarks.trl", "--python", python]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{python} does not exist or has no TRL; `make trl-environment` installs it" in done.stderr


def test_a_failed_trl_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 5\n")
    python.chmod(0o755)
    settings = build_settings(load_run(ROOT / "configs/tiny.toml", []), threads=1)
    with pytest.raises(TrlFailed, match=r"train_with_trl\.py in .* ended with exit code 5"):
        run_trl(python, settings)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_compared_run_and_trl_train_on_every_rollout_of_a_step() -> None:
    figures = run_program("trl --quick --python", str(ROOT / ".venv-trl/bin/python"))
    assert (figures["rollouts"], figures["rows"], figures["trl_rows"]) == (32, 32, 32)
    assert figures["roc_rows"] <= 16
    names = ("step_s", "tokens", "reward_s", "reward")
    assert {f"{kind}{name}" for kind in ("", "roc_", "trl_") for name in names} <= set(figures)
    assert figures["ratio"] > 0
    assert figures["roc_ratio"] > 0
