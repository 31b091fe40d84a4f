"""Tests of the texts in the table [dialogue]."""

from pathlib import Path
from typing import Any

import pytest

from asterism.configs.load import load_run, write_resolved
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig


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
def test_the_resolved_configuration_keeps_texts(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = RunConfig(name="a", dialogue=DialogueConfig(**changes))
    assert not run.dialogue.has_default_texts
    write_resolved(run, tmp_path / "run.toml")
    assert load_run(tmp_path / "run.toml").dialogue == run.dialogue
