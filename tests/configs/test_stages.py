"""[[stages]] of a configuration file have keys of a stage and of a run, and mistakes in both are named."""

from pathlib import Path

import pytest

from asterism.configs.load import load_run, load_stages
from asterism.configs.loading.config_layers import ConfigError

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


def test_a_stage_has_the_keys_of_the_run_and_its_own(config: Path) -> None:
    (short, first), (long, second) = load_stages(config)
    assert (short.name, short.problems, short.optimizer, short.problem_order) == ("short", "all", "keep", "continue")
    assert (long.name, long.problems, long.optimizer) == ("long", "unsolved", "reset")
    assert (first.learner.optimizer.lr, second.learner.optimizer.lr) == (1e-4, 2e-4)
    assert (first.rl.steps, second.rl.steps, second.dialogue.response_tokens) == (9, 9, 4096)
    assert second.dialogue.max_turns == 15
    assert second.data.test == str(config.parent / "hard.jsonl")  # relative to the file


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
    with pytest.raises(ConfigError, match=r"--set stage=x: unknown stage \"x\".*no \[\[stages\]\]"):
        load_run(path, ("stage=x",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[stages]]\nname = "s"\nrl.step = 3', r"`stages\[0\]`: unknown key `rl\.step`; did you mean `rl\.steps`"),
        ('[[stages]]\nname = "s"\nproblem = "all"', r"`stages\[0\]`: unknown key `problem`"),
        ('[[stages]]\nname = "s"\nmodel.checkpoint = "x"', r"a stage cannot have the key `model`; set it outside"),
        ('[[stages]]\nname = "s"\nproblems = "hard"', r"`stages\[0\]`: Invalid enum value 'hard' - at `problems`"),
        ("[[stages]]\nrl.steps = 3", r"`stages\[0\]`: .*missing required field `name`"),
        ('[[stages]]\nname = "s"\n[[stages]]\nname = "s"', 'the name "s" is used twice'),
        ('[[stages]]\nname = "s"\nproblems = "unsolved"', '"unsolved" needs a stage before'),
        ('[[stages]]\nname = "s"\nstage = "s"', "a stage cannot have the key `stage`; set it outside"),
        ('[[stages]]\nname = "v1.5"', r'`stages\[0\]`: name = "v1\.5": a dot separates the keys of --set'),
        ("stages = 3", "`stages` must be an array of tables, got 3"),
        ('[[stages]]\nname = "s"\nrl.steps = -3', r"stages\[0\]` \(s\): `rl\.steps` must be .*got -3"),
        ("[early_stopping]\nwindow_steps = 3", "window_steps needs min_reward_gain or max_overlong_share"),
        ("[early_stopping]\nmin_reward_gain = 0.1", "they need window_steps"),
        ('learner.resume_from = "x"\nsft.steps = 3', "sft.steps and sft.epochs must be 0 with learner.resume_from"),
    ],
)
def test_a_mistake_names_the_stage_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "a"\n{text}\n')
    with pytest.raises(ConfigError, match=message) as raised:
        load_stages(path) or load_run(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ['data.train = "a.jsonl"', '[stages.tasks.math]\ndata = "a.jsonl"'])
def test_a_stage_of_unsolved_problems_cannot_set_training_data(config: Path, text: str) -> None:
    config.write_text(f"{STAGES}\n{text}\n")
    with pytest.raises(
        ConfigError, match=r'stages\[1\]` \(long\): `(data\.train|tasks\.math\.data)`: problems = "unsolved"'
    ):
        load_stages(config)


def test_an_override_of_an_unknown_stage_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r'\[\[stages\]\] has no table with the name "shorter"; known: short, long'):
        load_stages(config, ("stages.shorter.rl.steps=3",))


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    "name",
    ["qwen3_1.7b_1gpu", "qwen3_4b_8gpu", "rstar2_14b_8gpu", "rstar2_14b_64gpu", "rstar2_release"],
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
