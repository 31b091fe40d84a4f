"""The table [[stages]] of a configuration file: keys of one stage and keys of the run."""

from pathlib import Path

import pytest

from asterism.configs.load import load_run, load_stages

STAGES = """
name = "a"
rl.steps = 9
[learner.optimizer]
lr = 1e-4
[[stages]]
name = "short"
[[stages]]
name = "long"
problems = "unsolved"
optimizer = "reset"
dialogue.response_tokens = 4096
dialogue.max_turns = 15
learner.optimizer.lr = 2e-4
data.test = "hard.jsonl"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(STAGES)
    return path


def test_a_stage_has_its_own_keys_and_those_of_the_run(config: Path) -> None:
    (short, first), (long, second) = load_stages(config)
    assert (short.name, short.problems, short.optimizer, short.problem_order) == ("short", "all", "keep", "continue")
    assert (long.name, long.problems, long.optimizer) == ("long", "unsolved", "reset")
    assert (first.learner.optimizer.lr, second.learner.optimizer.lr) == (1e-4, 2e-4)
    assert (first.rl.steps, second.rl.steps, second.dialogue.response_tokens) == (9, 9, 4096)
    assert second.dialogue.max_turns == 15
    assert second.data.test == str(config.parent / "hard.jsonl")  # the path is relative to the configuration file


def test_overrides_apply_to_all_stages_or_to_one(config: Path) -> None:
    (_, first), (long, second) = load_stages(
        config, ("rl.steps=3", "stages.long.dialogue.response_tokens=12288", "stages.long.problems=all")
    )
    assert (first.rl.steps, second.rl.steps) == (3, 3)
    assert (second.dialogue.response_tokens, long.problems) == (12_288, "all")
    assert first.dialogue.response_tokens == 8192


def test_load_run_takes_the_first_stage_or_the_named_one(config: Path) -> None:
    assert load_run(config) == load_stages(config)[0][1]
    assert load_run(config, ("stage=long",)) == load_stages(config)[1][1]


def test_a_configuration_without_stages_loads_no_stages(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "a"\n')
    assert load_stages(path) == []


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "name", ["qwen3_1.7b_1gpu", "qwen3_4b_8gpu", "rstar2_14b_8gpu", "rstar2_14b_64gpu", "rstar2_release"]
)
def test_each_key_of_a_configuration_for_gpus_has_a_comment(name: str) -> None:
    lines = (CONFIGS / f"{name}.toml").read_text().splitlines()
    keys = [line for line in lines if line and not line.startswith(("#", "["))]
    assert len(keys) > 15
    assert [line for line in keys if "  # " not in line] == []


@pytest.mark.parametrize("name", ["rstar2_14b_8gpu", "rstar2_14b_64gpu", "rstar2_whole_64gpu"])
def test_the_stages_equal_the_stages_of_the_report(name: str) -> None:
    stages = load_stages(CONFIGS / f"{name}.toml")
    limits = [
        (run.rl.steps * run.rl.prompts, run.dialogue.response_tokens, run.dialogue.max_turns) for _, run in stages
    ]
    assert limits == [(512 * 300, 8192, 10), (512 * 85, 12_288, 10), (512 * 125, 12_288, 15)]
    assert [options.problems for options, _ in stages] == ["all", "all", "unsolved"]


def test_the_whole_recipe_has_the_cold_start_and_the_three_stages() -> None:
    (_, first), *later = load_stages(CONFIGS / "rstar2_whole_64gpu.toml")
    cold_start = load_run(CONFIGS / "rstar2_cold_start.toml")
    assert first.sft == cold_start.sft
    assert [options.name for options, _ in later] == ["12k", "hard"]
    (_, reference), *_ = load_stages(CONFIGS / "rstar2_14b_64gpu.toml")
    assert (first.rl, first.roc, first.learner) == (reference.rl, reference.roc, reference.learner)
    assert "Base" in first.model.checkpoint
