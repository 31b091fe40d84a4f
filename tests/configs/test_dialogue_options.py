"""The table [dialogue] has these errors and texts."""

from pathlib import Path
from typing import Any

import pytest

from asterism.configs.load import load_run, write_resolved
from asterism.configs.loading.config_layers import ConfigError
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig


def load(*overrides: str) -> RunConfig:
    return load_run(None, ["name=a", *overrides])


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ('dialogue.stop_tokens=["<|endoftext|>"]', '`dialogue`: stop_tokens must contain "<|im_end|>"'),
        ("dialogue.stop_tokens=[]", '`dialogue`: stop_tokens must contain "<|im_end|>"'),
        ('dialogue.stop_tokens=["<|im_end|>", "<|im_end|>"]', "stop_tokens must not name a token twice"),
        ('dialogue.stop_tokens=["<|im_end|>", ""]', "`dialogue.stop_tokens[1]` must be"),
        (
            f"dialogue.stop_tokens={['<|im_end|>', *map(str, range(16))]}",
            "stop_tokens must name at most 16 tokens",
        ),
        ("dialogue.answer_open=</answer>", "answer_open and answer_close must differ"),
        ('dialogue.answer_close=""', "`dialogue.answer_close` must be"),
        ("dialogue.system=Use the tools.", 'system must describe the tool "jupyter_code"; add {tools}'),
        ("dialogue.system=", 'system must describe the tool "jupyter_code"'),
        ('dialogue={tools=[], system="A {tools}"}', "system must not contain {tools} without tools"),
        ('dialogue={tools=[], system="\\"jupyter_code\\""}', 'system describes "jupyter_code", which is not in tools'),
    ],
)
def test_an_error_names_the_key(override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load("dialogue.prefill=<think>", override)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"tools": (), "system": ""},
        {"tools": (), "system": "Answer."},
        {"system": "A\n{tools}\nB"},
        {"tools": ("jupyter_code",), "system": 'Call {"name": "jupyter_code"}.', "instruction": "", "prefill": ""},
        {"answer_open": "[A]", "answer_close": "[/A]", "turn_separator": ""},
    ],
)
def test_texts_survive_the_resolved_configuration(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = RunConfig(name="a", dialogue=DialogueConfig(**changes))
    assert not run.dialogue.has_default_texts
    write_resolved(run, tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml").dialogue == run.dialogue
