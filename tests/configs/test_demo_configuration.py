"""The dialogue of a run with `[tiny]` has one tool by default, and no other texts."""

from pathlib import Path

import pytest

from asterism.configs.load import load_run
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.run_config import RunConfig


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "my.toml"


@pytest.mark.parametrize("text", ["tiny = {}", "[tiny]\nnum_layers = 1", "tiny = {}\n[dialogue]\nmax_turns = 3"])
def test_the_demo_has_its_tool_without_further_keys(config: Path, text: str) -> None:
    config.write_text(f'name = "a"\n{text}')
    assert load_run(config).dialogue.tools == ("jupyter_code",)


def test_a_run_with_tasks_has_no_tool_of_the_demo(config: Path) -> None:
    task = '[[tasks]]\nname = "t"\nimport = "m:T"\ndata = "d.jsonl"\ntest = "e.jsonl"'
    config.write_text(f'name = "a"\ntiny = {{}}\n{task}')
    run = load_run(config)
    assert run.dialogue.tools == RunConfig(name="a").dialogue.tools
    assert run.tasks[0].get_dialogue().tools == ()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('dialogue.tools=["python_code_with_standard_io"]', "dialogue.tools: the tiny task supports only"),
        ("dialogue.tools=[]", "dialogue.tools: the tiny task supports only"),
        ("dialogue.prefill=<think>", "dialogue: the tiny task supports only the default texts"),
        ("dialogue.system=Hello {tools}", "dialogue: the tiny task supports only the default texts"),
        ('dialogue.stop_tokens=["<|im_end|>", "<stop>"]', "dialogue.stop_tokens: the tiny task's tokens are"),
        ("dialogue.renderer=qwen3", "dialogue.renderer: the tokenizer of "),
    ],
)
def test_texts_that_the_demo_lacks_are_refused_before_a_run_has_a_folder(
    config: Path, override: str, problem: str
) -> None:
    config.write_text('name = "a"\ntiny = {}\nsft.steps = 0')
    with pytest.raises(ConfigError) as caught:
        load_run(config, (override,))
    assert str(caught.value).startswith(f"{config}: ")
    assert problem in str(caught.value)
