"""`asterism config`: all keys with values and descriptions."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli.config_command import print_config, read_descriptions
from asterism.configs.load import load_run
from asterism.configs.schema import RunConfig
from asterism.configs.schema_tree import find_section, get_field_types
from tests.actors.runs.running import ROOT, asterism


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [[], ["learner.lr=2e-5", "sglang.environment.A=x", 'dialogue.tools=["jupyter_code"]']]
)
def test_the_printed_configuration_is_a_file_with_the_same_values(tmp_path: Path, overrides: list[str]) -> None:
    file = io.StringIO()
    print_config(ROOT / "configs/tiny.toml", overrides, Console(file=file, width=40))
    printed = tmp_path / "printed.toml"
    printed.write_text(file.getvalue())
    assert load_run(printed) == load_run(ROOT / "configs/tiny.toml", overrides)


@pytest.mark.slow
def test_every_key_has_a_description() -> None:
    sections = {key: section for key, kind in get_field_types(RunConfig).items() if (section := find_section(kind))}
    described = {
        f"{name}.{key}": text for name, each in sections.items() for key, text in read_descriptions(each).items()
    }
    described |= {key: text for key, text in read_descriptions(RunConfig).items() if key not in sections}
    keys = {f"{name}.{key}" for name, section in sections.items() for key in get_field_types(section)}
    assert set(described) == keys | (set(get_field_types(RunConfig)) - set(sections))
    assert [key for key, text in described.items() if len(text) < 5] == []


@pytest.mark.slow
def test_the_command_has_a_version_a_short_help_flag_and_completion() -> None:
    assert asterism("--version").stdout.startswith("asterism ")
    assert asterism("run", "-h").stdout == asterism("run", "--help").stdout != ""
    assert "--install-completion" in asterism("-h").stdout
